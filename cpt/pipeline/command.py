"""`cpt pipeline FILE`: several recipes in a row, each a run of its own; what is finished is skipped, what was
interrupted goes on."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from cpt.command_line import refuse_ignored, show_log
from cpt.console import open_console
from cpt.errors import Interrupted, LaunchError
from cpt.launchers.attempts import BY_THE_LAUNCHER, command_of_attempt
from cpt.pipeline.processes import KILLED, StepProcess, refuse_a_launcher
from cpt.pipeline.steps import Pipeline, Step, chosen, load_pipeline
from cpt.preflight.gate import report
from cpt.ranks import tell


def command(
    file: Annotated[Path, typer.Argument(help="A YAML file with `name` and `steps`, a list of recipes.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, on top of every step's recipe.")
    ] = None,
    first: Annotated[
        str | None, typer.Option("--from", help="Begin with this step: its number, or its run's name.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Run this step and no other.")] = None,
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
    """Run recipes one after the other; give the same command again to go on.

    What is finished is skipped: give the same command again to go on.

    Example: cpt pipeline pipeline.yaml --dry-run
    """
    show_log()
    if problem := refuse_a_launcher():
        raise LaunchError(problem)
    refuse_ignored({"--processes": processes > 1 and launcher is not None}, BY_THE_LAUNCHER)
    refuse_ignored({"--from": first is not None and only is not None}, "with --only")
    pipeline = load_pipeline(file, overrides or ())
    steps = chosen(pipeline, first, only)
    show(pipeline)
    if mistakes := sum(check_step(pipeline, step, steps) for step in steps):
        tell(f"{mistakes} of {len(steps)} steps cannot run. Nothing was started.")
        raise typer.Exit(2)
    for step in [] if dry_run else steps:
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
        process = StepProcess(step.run, command_of_attempt(words, 1, None))
        code = process.wait()
        if code != 0 or not step.run.is_finished:
            end(pipeline, step, file, code, process.told)
    if not dry_run:
        show(pipeline)


def check_step(pipeline: Pipeline, step: Step, steps: Sequence[Step]) -> bool:
    """Whether the step has mistakes; of one whose model is still to be made, only what the recipe itself shows is
    checked.

    Args:
        steps: those that are going to run.
    """
    if step.run.is_finished:
        return False
    waiting = [other for other in pipeline.made_by_others(step) if not other.run.is_finished]
    if absent := [other for other in waiting if other not in steps]:
        tell(
            f"step {step.number} goes on from {absent[0].run.folder}, which is not finished: begin with --from"
            f" {absent[0].recipe.name}"
        )
        return True
    if waiting:
        tell(
            f"{step.file}: goes on from {waiting[0].run.folder}, so files and memory are checked when step"
            f" {waiting[0].number} has made it."
        )
        return False
    found = report(step.file, step.recipe, step.root)
    return bool(found.mistakes or found.blockers)


def end(pipeline: Pipeline, step: Step, file: Path, code: int, told: int) -> None:
    """Say how the step ended and how to go on.

    Raises:
        Interrupted: it was told to stop, or says itself that it goes on.
        typer.Exit: with the step's own code.
    """
    show(pipeline)
    status = step.run.status()
    again = f"The same command goes on there: cpt pipeline {file}"
    if code == Interrupted.exit_code or told and code == KILLED + told:
        why = f"{signal.Signals(told).name}: " if told else ""
        raise Interrupted(
            f"{why}step {step.number}, {step.recipe.name}, stopped at step {status.get('step', 0)} of its run. {again}"
        )
    said = str(status.get("message") or "see what it wrote above").splitlines()[0]
    tell(
        f"step {step.number}, {step.recipe.name}, ended with exit code {code}: {said}\nLater steps were not started."
        f" Mend it. {again}"
    )
    raise typer.Exit(code or 1)


def show(pipeline: Pipeline) -> None:
    """One line a step."""
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
