"""`cpt data check`: every row of the documents, before a run reads them."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cpt.command_line import refuse_ignored
from cpt.console import open_console
from cpt.data.checking.bad_rows import Listed, absurd_share, refuse_too_many
from cpt.data.checking.rows import FileCounts, count_source, reasons
from cpt.data.forms import form_of_source
from cpt.data_commands.example_gate import ExampleGate
from cpt.data_commands.showing import OneSource, Overrides, chosen_sources
from cpt.errors import CptError, DataError, RecipeError
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_document_file
from cpt.recipe.schema import Data, DocumentSource, Source
from cpt.recipe.sense_data import reported_name

FILES_SHOWN, BAD_ROWS_SHOWN = 20, 20
TRUNCATED_SHARE = 0.05


def check_command(
    recipe: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="The recipe's YAML file, or a folder or file of documents.")
    ],
    overrides: Overrides = None,
    source: OneSource = None,
    output: Annotated[
        Path | None, typer.Option(help="List all bad rows in this file, one JSON object a line.")
    ] = None,
    truncated_share: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Of examples: more than this share longer than data.sequence_length is a mistake."
        ),
    ] = TRUNCATED_SHARE,
) -> None:
    """Read every row of every source and say which are bad; exit code 2 when a run would stop at them, or learn what
    is wrong.

    Example: cpt data check recipe.yaml --output bad_rows.jsonl
    """
    console = open_console()
    if recipe.is_dir() or is_document_file(recipe.name):
        if overrides or source:
            raise RecipeError(f"{recipe} holds documents; key=value and --source need a recipe.")
        data, gate = Data(sources=[Source(path=str(recipe))]), None
        sources: list[tuple[str, DocumentSource]] = [("data.sources[0]", data.sources[0])]
    else:
        loaded = load_recipe(recipe, overrides or ())
        data, gate, sources = (
            loaded.data,
            ExampleGate(console, loaded, truncated_share),
            list(chosen_sources(loaded, source)),
        )
    has_examples = any(form_of_source(one) != "document" for _, one in sources)
    refuse_ignored(
        {"--truncated-share": truncated_share != TRUNCATED_SHARE and not has_examples},
        "on documents: a long one continues in the next row",
    )
    found: list[Listed] = []
    mistakes: list[CptError] = []
    for key, one in sources:
        checks: list[Callable[[], None]] = [partial(check_source, console, data, one, key, found)]
        if gate is not None and form_of_source(one) != "document":
            checks.append(partial(gate.check, one, key))  # of the good rows, also where others are bad
        for check in checks:
            try:
                check()
            except CptError as problem:
                mistakes.append(problem)
    if output is not None:
        output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    for mistake in mistakes:
        console.print(f"{type(mistake).__name__}: {mistake}", style="red", markup=False)
    console.print(
        f"{recipe}: {len(mistakes)} mistake(s)." if mistakes else f"{recipe}: a run can read all of it.", markup=False
    )
    raise typer.Exit(2 if mistakes else 0)


def check_source(console: Console, data: Data, source: DocumentSource, key: str, found: list[Listed]) -> None:
    """Count and show what is in a source, add its bad rows to `found`, and judge it as a run would."""
    name = reported_name(source)
    files = list(count_source(source, key))
    bad = [row for counts in files for row in counts.bad]
    documents, characters = sum(counts.documents for counts in files), sum(counts.num_characters for counts in files)
    found += bad
    show_counts(console, name, files)
    for row in bad[:BAD_ROWS_SHOWN]:
        byte = "" if row["byte"] is None else f" (byte {row['byte']:,})"
        console.print(f"  {row['where']}: {row['detail']}{byte}", style="yellow", markup=False)
    if len(bad) > BAD_ROWS_SHOWN:
        console.print(f"  ... and {len(bad) - BAD_ROWS_SHOWN:,} more; --output FILE lists all of them")
    where, longest = max((counts.longest for counts in files), key=lambda found: found[1], default=("", 0))
    if giant := absurd_share(name, where, longest, characters, documents, "characters"):
        console.print(giant, style="yellow", markup=False)
    if bad and data.on_bad_row == "error":
        raise DataError(
            f"{source.path}: {sum(row['rows'] for row in bad):,} bad row(s). Fix them ({key}.path), or write"
            " `data.on_bad_row: skip`."
        )
    refuse_too_many(sum(row["rows"] for row in bad), documents, data.max_bad_share, source.path, key, bad)
    if documents == sum(counts.empty for counts in files):
        raise DataError(f"{source.path}: no document with any text. Set `{key}.path`.")


def show_counts(console: Console, name: str, files: Sequence[FileCounts]) -> None:
    """A row per file: those with bad rows, and as many of the others as fit."""
    table = Table(
        Column("file", overflow="fold"),
        "documents",
        "of these empty",
        "characters",
        "bad rows",
        "why",
        title=name,
        title_justify="left",
    )
    shown = sorted(range(len(files)), key=lambda number: not files[number].bad)[:FILES_SHOWN]
    for counts in [files[number] for number in sorted(shown)]:
        table.add_row(
            escape(counts.path), *numbers_of([counts]), reasons(counts.bad), style="yellow" if counts.bad else None
        )
    if len(files) > 1:
        table.add_row(
            f"all {len(files):,} files", *numbers_of(files), reasons([row for counts in files for row in counts.bad])
        )
    console.print(table)


def numbers_of(files: Sequence[FileCounts]) -> list[str]:
    """Documents, empty ones, characters and bad rows of all of them."""
    rows = zip(
        *((counts.documents, counts.empty, counts.num_characters, counts.num_bad) for counts in files), strict=True
    )
    return [f"{sum(numbers):,}" for numbers in rows]
