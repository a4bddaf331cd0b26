"""`cpt pipeline FILE`: several recipes in a row, each a run of its own. Finished runs are skipped, interrupted ones
resume."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cpt.command_line import refuse_ignored, show_log
from cpt.commands.pipeline.steps import Pipeline, Step, load_pipeline
from cpt.console import open_console
from cpt.errors import Interrupted, LaunchError
from cpt.launch.supervise import BY_THE_LAUNCHER, command_of_attempt
from cpt.planning.gate import report
from cpt.process import Child
from cpt.ranks import tell
from cpt.runs.heartbeats import remove_heartbeats

KILLED = 128  # what shells add to the number of a signal


def command(
    file: Annotated[Path, typer.Argument(help="A YAML file with `name` and `steps`, a list of recipes.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, on top of every step's recipe.")
    ] = None,
    supervise: Annotated[
        bool, typer.Option("--supervise", help="Watch each run, and start it again where it ends too early.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes of each run, on this machine.")] = 1,
    launcher: Annotated[
        str | None, typer.Option(help='The launcher to start them with, such as "accelerate launch".')
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all recipes and show where each run stands; start nothing.")
    ] = False,
) -> None:
    """Run recipes one after the other; type the same command again to resume.

    Finished runs are skipped.

    Example: cpt pipeline pipeline.yaml --dry-run
    """
    show_log()
    if "RANK" in os.environ:
        hint = '--launcher "accelerate launch --config_file FILE"'
        raise LaunchError(f"a pipeline starts the processes of its runs: type `cpt pipeline FILE`, with {hint}.")
    refuse_ignored({"--processes": processes > 1 and launcher is not None}, BY_THE_LAUNCHER)
    pipeline = load_pipeline(file, overrides or ())
    show(pipeline)
    if mistakes := sum(check_step(pipeline, step) for step in pipeline.steps):
        tell(f"{mistakes} of {len(pipeline.steps)} steps cannot run. Nothing was started.")
        raise typer.Exit(2)
    for step in () if dry_run else pipeline.steps:
        if step.run.is_finished:
            tell(
                f"step {step.number}, {step.recipe.name}: finished already, its model is in {step.run.export_folder}."
            )
            continue
        how = ["--launcher", launcher] if launcher is not None else ["--processes", str(processes)]
        words = [str(step.file), *step.overrides, *how, *(["--supervise"] if supervise else [])]
        tell(
            f"step {step.number} of {len(pipeline.steps)}, {step.recipe.name} ({step.recipe.stage}): {step.run.folder}"
        )
        code, forwarded = run_step(step, command_of_attempt(words, 1, None))
        if code != 0 or not step.run.is_finished:
            end(pipeline, step, file, code, forwarded)
    if not dry_run:
        show(pipeline)


def check_step(pipeline: Pipeline, step: Step) -> bool:
    """Whether the step has mistakes. Without its model, which an earlier step makes, only its recipe is checked."""
    if step.run.is_finished:
        return False
    waiting = [other for other in pipeline.made_by_others(step) if not other.run.is_finished]
    if waiting:
        folder, number = waiting[0].run.folder, waiting[0].number
        tell(f"{step.file}: continues from {folder}, so files and memory are checked after step {number}.")
        return False
    found = report(step.file, step.recipe, step.root)
    return bool(found.mistakes or found.blockers)


def run_step(step: Step, words: Sequence[str]) -> tuple[int, int]:
    """Run a step's command to its end.

    Returns:
        The exit code of the run, which launchers replace by their own, and the signal that was forwarded or 0.
    """
    if step.run.folder.is_dir():
        remove_heartbeats(step.run.folder)
    before = step.run.status().get("updated")
    code, forwarded = Child(words).wait_for_end()
    status = step.run.status()
    if code != 0 and "exit_code" in status and status.get("updated") != before:
        return int(status["exit_code"]), forwarded
    return code if code >= 0 else KILLED - code, forwarded


def end(pipeline: Pipeline, step: Step, file: Path, code: int, forwarded: int) -> None:
    """Report how the step ended and how to resume.

    Raises:
        Interrupted: it was stopped by a signal.
        typer.Exit: it failed; with its exit code.
    """
    show(pipeline)
    status = step.run.status()
    again = f"The same command resumes there: cpt pipeline {file}"
    if code == Interrupted.exit_code or forwarded and code == KILLED + forwarded:
        why = f"{signal.Signals(forwarded).name}: " if forwarded else ""
        raise Interrupted(
            f"{why}step {step.number}, {step.recipe.name}, stopped at step {status.get('step', 0)} of its run. {again}"
        )
    reason = str(status.get("message") or "see its output above").splitlines()[0]
    tell(f"step {step.number}, {step.recipe.name}, ended with exit code {code}: {reason}")
    tell(f"Later steps were not started. Fix the cause. {again}")
    raise typer.Exit(code or 1)


def show(pipeline: Pipeline) -> None:
    table = Table("step", "stage", "run", "status", title=pipeline.name, title_justify="left")
    for step in pipeline.steps:
        table.add_row(str(step.number), step.recipe.stage, str(step.run.folder), status_of(step))
    open_console().print(table, markup=False)


def status_of(step: Step) -> str:
    """`interrupted at 40 of 100`, `finished`, `waiting`."""
    status = step.run.status()
    if step.run.is_finished:
        return "finished"
    state = str(status.get("state", "waiting"))
    return f"{state} at {status['step']} of {status['steps']}" if "step" in status and "steps" in status else state
