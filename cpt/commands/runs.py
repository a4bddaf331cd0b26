"""`cpt runs` lists runs with their newest metrics; `cpt verify` checks checkpoints for damage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from cpt.command_line import AsJson, print_json
from cpt.errors import CheckpointError
from cpt.formatting import format_bytes, format_count, format_duration, open_console
from cpt.runs.folder import Values, is_bits_per_byte, list_runs, set_name

STYLES = {
    "running": "cyan",
    "finished": "green",
    "failed": "red",
    "died": "red",
    "interrupted": "yellow",
}
TEXTS = ("run", "stage", "state", "from", "tags")


def command(
    folder: Annotated[
        Path, typer.Argument(help="Folder of the runs: `output_dir` of their recipes.")
    ] = Path("runs"),
    where: Annotated[
        list[str] | None, typer.Option(help="Filter: state=finished, tag=x, loss<2.5.")
    ] = None,
    sort: Annotated[
        str | None, typer.Option(help="Column, -loss for descending; default: newest first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder: state, steps, tokens, loss, held-out bits per byte, speed, age, origin, tags.

    Bits per byte come from the newest evaluation on held-out text.

    Example: cpt runs --where state=finished --where "loss<2.5" --sort loss
    """
    runs = list_runs(folder, where or [], sort)
    if as_json:
        print_json([{"folder": str(run), **values} for run, values in runs.items()])
    elif not runs:
        typer.echo(f"No such runs below {folder}." if where else f"No runs below {folder}.")
    else:
        open_console().print(table_of_runs(list(runs.values())))


def table_of_runs(runs: Sequence[Values]) -> Table:
    """A row per run; a column that is empty in all of them is dropped."""
    rows = list(map(run_cells, runs))
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    for heading in headings:
        if heading in TEXTS:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(heading, justify="right", overflow="fold", no_wrap=True)
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    return table


def run_cells(values: Values) -> dict[str, str]:
    state = escape(values["state"])
    style = STYLES.get(values["state"])
    if style is not None:
        state = f"[{style}]{state}[/{style}]"
    step = format_count(values["step"])
    steps = format_count(values["steps"])
    if steps and step != steps:
        step = f"{step or 0}/{steps}"
    return {
        "run": escape(values["name"]),
        "stage": escape(values["stage"] or ""),
        "state": state,
        "step": step,
        "tokens": format_count(values["tokens"]),
        "loss": decimal(values["loss"]),
        "bits per byte": held_out(values),
        "tokens/s": format_count(values["tokens_per_second"]),
        "age": format_duration(max(0.0, values["age"])),
        "from": escape(values["from"] or ""),
        "tags": escape(", ".join(values["tags"])),
    }


def held_out(values: Values) -> str:
    """The bits per byte of each held-out set, with its name if there are several."""
    sets = {}
    for key, value in values.items():
        if is_bits_per_byte(key):
            sets[set_name(key)] = decimal(value)
    if len(sets) == 1:
        return sets.popitem()[1]
    return escape("  ".join(f"{name} {value}" for name, value in sets.items()))


def decimal(number: float | None) -> str:
    return "" if number is None else f"{number:.4f}"


def verify_command(
    path: Annotated[Path, typer.Argument(help="A run's folder, or one checkpoint.")],
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the run's base, tokenizer and teacher too.")
    ] = False,
) -> None:
    """Verify sizes and hashes of checkpoints; exit code 2 if files are damaged.

    Each start of a run compares its base, tokenizer and teacher by size and times. --deep reads them, and so finds
    what a disk changed without a write.

    Example: cpt verify runs/my-run
    """
    from cpt.checkpoints.manifest import verify_path

    checkpoints = verify_path(path)
    num_damaged = 0
    listing = []
    for checkpoint in checkpoints:
        if checkpoint.found:
            num_damaged += 1
            listing.append(f"  {checkpoint.folder}:")
            listing += [f"  {damage}" for damage in checkpoint.found]
        else:
            size = format_bytes(checkpoint.num_bytes)
            typer.echo(f"{checkpoint.folder}: intact (step {checkpoint.step}, {size} read)")
    if num_damaged:
        raise CheckpointError(
            f"{num_damaged} of {len(checkpoints)} are damaged:\n" + "\n".join(listing) + "\n"
            "`cpt train` skips damaged checkpoints and resumes from an older one.\n"
            "Write a damaged model again: cpt export RUN/checkpoint-N --output FOLDER."
        )
    if deep:
        from cpt.training.inputs import read_inputs_again

        typer.echo(f"{path}: {read_inputs_again(path)} files of models and tokenizers are intact")
