"""`cpt rehearse RECIPE`: do once, in minutes, all that a run will do, and say what would have gone wrong."""

import os
import shlex
import signal
from pathlib import Path
from typing import Annotated

import typer

from cpt.command_line import refuse_ignored
from cpt.console import open_console, show_step, while_working
from cpt.errors import LaunchError, RehearsalError, ResourceError
from cpt.launchers.attempts import BY_THE_LAUNCHER, refuse_more_than_the_machine_holds
from cpt.recipe.load import load_with_places
from cpt.rehearsal.rehearse import Rehearsal, remove_scratch, scratch_folder
from cpt.rehearsal.starting import Launch
from cpt.rehearsal.table import Finding, as_json, shown


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter with our defaults.")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes on this machine: as many as the run will have.")
    ] = 1,
    launcher: Annotated[
        str | None, typer.Option(help='The launcher to start them with, such as "accelerate launch".')
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the rehearsal's folder: checkpoint, export and logs.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result for programs.")] = False,
) -> None:
    """Rehearse a run: longest rows, evaluation, save, verify, export, resume, disk. Exit code 2 where something would
    go wrong.

    It works in a folder of its own beside the run's, on the same disk, and touches nothing of the run. The folder is
    removed at the end, unless something failed.

    Example: cpt rehearse recipe.yaml --processes 2
    """
    if "RANK" in os.environ:
        raise LaunchError(
            "a rehearsal starts the run's processes itself. Type `cpt rehearse RECIPE --processes N`, or with another"
            ' launcher: --launcher "accelerate launch --config_file FILE".'
        )
    refuse_ignored({"--processes": processes > 1 and launcher is not None}, BY_THE_LAUNCHER)
    loaded, root = load_with_places(recipe, overrides or (), lora=lora)
    if launcher is None:
        refuse_more_than_the_machine_holds(processes, on_gpus=not loaded.training.get("use_cpu"))
    with scratch_folder(loaded) as scratch:
        rehearsal = Rehearsal(loaded, root, Launch(processes, launcher), scratch)
        findings = rehearsed(rehearsal, silent=json)
        failed = [finding.step for finding in findings if finding.verdict == "FAILED"]
        kept = keep or bool(failed) and failed != ["recipe"]
        if not kept:
            remove_scratch(scratch)
    if json:
        typer.echo(as_json(findings, str(scratch) if kept else None))
    where = f" What it made is kept in {scratch}, until the next rehearsal." if kept else ""
    if failed:
        raise RehearsalError(f"the run would not go well: {', '.join(failed)}.{where}")
    if not json:
        words = ["cpt", "train", str(recipe), *(overrides or ()), *(["--lora"] if lora else [])]
        if processes > 1 or launcher is not None:
            words += [
                "--supervise",
                *(["--launcher", launcher] if launcher is not None else ["--processes", str(processes)]),
            ]
        typer.echo(f"All that the run will do was done once.{where} Start it: {shlex.join(words)}")


def rehearsed(rehearsal: Rehearsal, *, silent: bool) -> list[Finding]:
    """The rows, printed as they become known; whoever stops it, or a disk without room, leaves nothing behind.

    Raises:
        ResourceError: the disk has not even room for the rehearsal's notes.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    status = open_console(stderr=True).status("")
    if not silent:
        rehearsal.tell = lambda finding: typer.echo(shown(finding))
        rehearsal.begin = lambda what: show_step(status, f"{what} ...")
    try:
        with while_working(status):
            return rehearsal.rehearse()
    except KeyboardInterrupt as problem:
        remove_scratch(rehearsal.scratch)
        typer.echo("Interrupted. The rehearsal's processes are ended, its folder is removed.", err=True)
        raise typer.Exit(130) from problem
    except OSError as problem:
        remove_scratch(rehearsal.scratch)
        text = (
            f"`output_dir`: the rehearsal could not write in {rehearsal.recipe.output_dir} ({problem}), and neither"
            " could the run"
        )
        raise ResourceError(f"{text}: free some, or set output_dir to another disk.") from problem
