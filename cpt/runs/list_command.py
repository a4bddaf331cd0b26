"""`cpt runs [FOLDER]`: what ran here, how it stands, and what it came to."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cpt.console import open_console
from cpt.runs.folder import BITS_PER_BYTE, EVALUATED
from cpt.runs.listing import ListedRun, list_runs

STYLES = {"running": "cyan", "finished": "green", "failed": "red", "died": "red", "interrupted": "yellow"}
AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def command(
    folder: Annotated[Path, typer.Argument(help="Where the runs lie: `output_dir` of their recipes.")] = Path("runs"),
    where: Annotated[
        list[str] | None,
        typer.Option(help="Only runs with state=finished, tag=x, loss<2.5, name~pattern ...; may be given again."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(help="A column: loss for the smallest first, -loss for the largest; else the newest first."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one JSON list.")] = False,
) -> None:
    """List the runs below a folder: state, steps, tokens, loss, held-out bits per byte, speed, age, tags.

    Bits per byte are those of the newest evaluation on held-out text.

    Example: cpt runs --where state=finished --where "loss<2.5" --sort loss
    """
    runs = list_runs(folder, where or [], sort)
    if as_json:
        typer.echo(json.dumps([{"folder": str(run.folder), **run.values} for run in runs], indent=2))
    elif not runs:
        conditions = f" with {', '.join(where)}" if where else ""
        typer.echo(f"No runs below {folder}{conditions}.")
    else:
        print_runs(runs, open_console())


def print_runs(runs: Sequence[ListedRun], console: Console) -> None:
    """A row for each; columns that no run fills are left out."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    rows = [run_cells(run) for run in runs]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    for name in shown:
        is_text = name in ("run", "stage", "state", "tags")
        table.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    console.print(table)


def run_cells(run: ListedRun) -> dict[str, str]:
    values = run.values
    state = values["state"]
    style = STYLES.get(state)
    return {
        "run": escape(values["name"]),
        "stage": escape(values["stage"] or ""),
        "state": f"[{style}]{state}[/{style}]" if style else escape(state),
        "step": step_of(values),
        "tokens": whole(values["tokens"]),
        "loss": decimal(values["loss"]),
        "bits per byte": held_out(values),
        "tokens/s": whole(values["tokens_per_second"]),
        "age": told_age(values["age"]),
        "tags": escape(", ".join(values["tags"])),
    }


def step_of(values: dict[str, Any]) -> str:
    """`120/430`, or `430` at the end."""
    step, steps = whole(values["step"]), whole(values["steps"])
    return step if step == steps or not steps else f"{step or 0}/{steps}"


def held_out(values: dict[str, Any]) -> str:
    """Each set with its name where there are several."""
    sets = {
        key.removeprefix(EVALUATED).removesuffix(BITS_PER_BYTE): value
        for key, value in values.items()
        if key.startswith(EVALUATED)
    }
    if len(sets) == 1:
        return decimal(next(iter(sets.values())))
    return escape("  ".join(f"{name} {decimal(value)}" for name, value in sets.items()))


def whole(number: float | None) -> str:
    return "" if number is None else f"{number:,.0f}"


def decimal(number: float | None) -> str:
    return "" if number is None else f"{number:.4f}"


def told_age(seconds: float) -> str:
    """`3 h`, in the largest unit of which there are two."""
    seconds = max(0.0, seconds)
    size, unit = next(((size, unit) for size, unit in AGES if seconds >= 2 * size), AGES[-1])
    return f"{math.floor(seconds / size)} {unit}"
