"""`cpt reproduce RUN`: run it again from its record, and say whether it is the same, or what is not."""

import contextlib
import json as json_module
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cpt.command_line import refuse_ignored
from cpt.errors import LaunchError
from cpt.hardware import find_gpus
from cpt.launchers.attempts import BY_THE_LAUNCHER, refuse_more_than_the_machine_holds
from cpt.ranks import tell
from cpt.reproduce.again import repetition_of, run_again
from cpt.reproduce.comparison import Comparison, compare_runs
from cpt.reproduce.inputs import refuse_changed_inputs
from cpt.reproduce.record import METRICS, Record, contents, lines_of, read_record
from cpt.reproduce.surroundings import Difference, changes_on_the_way, differing_surroundings
from cpt.runs.environment import describe_environment
from cpt.runs.folder import EXPORT, INPUTS

DIFFERS = 3  # the exit code: 2 is a mistake of the user's


def command(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    steps: Annotated[int | None, typer.Option(help="How many of its steps; by default all.", min=1)] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="How many processes; by default as many as it had.")
    ] = None,
    launcher: Annotated[
        str | None, typer.Option(help='The launcher to start them with, such as "accelerate launch".')
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the repetition, RUN-reproduced, also where it is the same.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result for programs.")] = False,
) -> None:
    """Run a run again from its record. Exit code 3 where its losses are others; then it says which of code, versions
    or hardware are.

    Data, tokenizer and weights must be what they were: each file that is not is named, and nothing is run.

    Example: cpt reproduce runs/my-run --steps 100
    """
    if "RANK" in os.environ:
        raise LaunchError(
            "a repetition starts its processes itself: type `cpt reproduce RUN`, with --launcher where it needs"
            " another."
        )
    refuse_ignored({"--processes": processes is not None and launcher is not None}, BY_THE_LAUNCHER)
    record = read_record(run)
    number = processes or record.processes
    refuse_too_few_gpus(record, number, given=processes is not None or launcher is not None)
    if launcher is None:
        refuse_more_than_the_machine_holds(number, on_gpus=not record.recipe.training.get("use_cpu"))
    end = record.first_log_from(steps) if steps is not None else None
    with contextlib.chdir(record.place):
        refuse_changed_inputs(record)
        differences = differing_surroundings(record.environment, {**describe_environment(), "processes": number})
    if not json:
        if end != steps and end is not None:
            tell(
                f"The loss was logged at step {end} and not at {steps}, as a mean since the log before: {end} steps"
                " are run."
            )
        for difference in differences:
            tell(f"Other than then: {difference}.")
    again = run_again(record, repetition_of(record), steps=end, processes=number, launcher=launcher, quiet=json)
    differences += [*of_rows(record.inputs, again.folder), *changes_on_the_way(record.environment, record.starts)]
    comparison = compare_runs(
        record.lines, lines_of(again.folder / METRICS), (record.folder / EXPORT, again.folder / EXPORT)
    )
    kept = keep or not comparison.is_bit_equal
    if not kept:
        shutil.rmtree(again.folder)
    if json:
        typer.echo(as_json(comparison, differences, again.folder if kept else None))
    else:
        for line in told(comparison, differences, run, run.parent / again.folder.name if kept else None):
            tell(line)
    if not comparison.is_bit_equal:
        raise typer.Exit(DIFFERS)


def refuse_too_few_gpus(record: Record, processes: int, *, given: bool) -> None:
    """Say it before anything is built.

    Raises:
        LaunchError: the run had a GPU for each process, and there are fewer here.
    """
    on_gpus = bool(record.environment.get("hardware", {}).get("gpus")) and not record.recipe.training.get("use_cpu")
    here = len(find_gpus()) if on_gpus and not given else processes
    if here < processes:
        raise LaunchError(
            f"{record.folder.name} ran on {processes} GPUs, and here are {here}. With --processes {max(1, here)} its"
            " losses are the same up to rounding only; with --launcher it can be started over several machines."
        )


def of_rows(inputs: Mapping[str, Any], again: Path) -> list[Difference]:
    """Rows that are others although the files are the same: they were filtered, tokenised or ordered in another
    way."""
    then, now = (found.get("data", {}).get("fingerprint") for found in (inputs, contents(again / INPUTS)))
    return (
        []
        if then == now
        else [Difference("data", "the rows made of the same files (fingerprint)", str(then), str(now))]
    )


def told(comparison: Comparison, differences: list[Difference], run: Path, kept: Path | None) -> list[str]:
    """The verdict in a few lines."""
    where = f" The repetition is kept: cpt compare {run} {kept}" if kept else ""
    if comparison.is_bit_equal:
        evaluations = f" and {number_of(comparison.evaluations, 'evaluation')}" if comparison.evaluations else ""
        weights = ", and so are the final weights" if comparison.weights_differ is not None else ""
        counted = f"{number_of(comparison.logs, 'logged loss')}{evaluations} up to step {comparison.last_step}"
        return [f"Bit-equal: {counted} are the same{weights}.{where}"]
    lines = []
    if (first := comparison.difference) is not None:
        lines.append(f"NOT the same: {first.figure} of step {first.step} was {first.then} and is {first.now}.")
    elif comparison.weights_differ:
        lines.append(
            f"NOT the same: the losses are, but not the final weights: {', '.join(comparison.weights_differ)}."
        )
    else:
        lines.append("NOT compared: the repetition logged no loss at a step where the run did.")
    if differences:
        lines += ["What differs from then:", *(f"  {difference}" for difference in differences)]
    else:
        lines.append(
            "Code, data, versions and hardware are the same. What is left: kernels that add up in no fixed order"
            " (`training: {full_determinism: true}` makes them repeatable, at a cost), a change of processes or of the"
            " micro-batch on the way (see starts.jsonl and events.jsonl), or code of your own that draws numbers by"
            " itself."
        )
    return [*lines, where.strip()]


def number_of(count: int, what: str) -> str:
    """`1 logged loss`, `5 logged losses`."""
    plural = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{count} {what if count == 1 else plural}"


def as_json(comparison: Comparison, differences: list[Difference], kept: Path | None) -> str:
    """For programs."""
    content = {
        "bit_equal": comparison.is_bit_equal,
        **asdict(comparison),
        "differs": [asdict(difference) for difference in differences],
        "folder": str(kept) if kept else None,
    }
    return json_module.dumps(content, indent=2)
