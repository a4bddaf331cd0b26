"""`cpt data check` and `cpt data preview`: what is in the documents, before a run reads them."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cpt.data.bad_rows import Listed, absurd_share, refuse_too_many
from cpt.data.check import keyed_sources
from cpt.data.check_rows import FileCounts, count_source, reasons
from cpt.data.preview import RowPart, Seen, packed_rows, see_source
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import CptError, DataError, RecipeError
from cpt.extend import did_you_mean
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Data, DocumentSource, Recipe
from cpt.recipe.sense_data import reported_name
from cpt.tokenizer.load import load_tokenizer

FILES_SHOWN, BAD_ROWS_SHOWN = 20, 20
EXCERPT = 60  # characters of a document
COLOURS = ("black on bright_cyan", "black on bright_yellow", "black on bright_green", "black on bright_magenta")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

RecipePath = Annotated[Path, typer.Argument(help="The recipe's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")]
OneSource = Annotated[str | None, typer.Option(help="Only the source of this name.")]


@app.command("check")
def check_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    source: OneSource = None,
    output: Annotated[Path | None, typer.Option(help="List all bad rows in this file, one JSON object a line.")] = None,
) -> None:
    """Read every row of every source and say which are bad; exit code 2 when a run would stop at them."""
    loaded, console = load_recipe(recipe, overrides or ()), plain_console()
    found: list[Listed] = []
    mistakes: list[CptError] = []
    for key, one in chosen_sources(loaded, source):
        try:
            check_source(console, loaded.data, one, key, found)
        except CptError as problem:
            mistakes.append(problem)
    if output is not None:
        output.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    for mistake in mistakes:
        console.print(f"{type(mistake).__name__}: {mistake}", style="red", markup=False)
    console.print(f"{recipe}: {len(mistakes)} mistake(s)." if mistakes else f"{recipe}: a run can read all of it.", markup=False)
    raise typer.Exit(2 if mistakes else 0)


@app.command("preview")
def preview_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    source: OneSource = None,
    rows: Annotated[int, typer.Option(min=0, help="Packed rows to show of each source.")] = 3,
    documents: Annotated[int, typer.Option(min=1, help="How many documents of each source to look at, from its beginning.")] = 1000,
) -> None:
    """Show which of the first documents a run keeps, which it drops and why, and how they are packed into rows."""
    loaded, console = load_recipe(recipe, overrides or ()), plain_console()
    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    encoder = DocumentEncoder(tokenizer)
    for key, one in chosen_sources(loaded, source):
        seen = see_source(loaded.data, one, key, documents)
        show_seen(console, seen)
        for number, parts in packed_rows(seen.kept, encoder, loaded.data, loaded.seed, rows):
            show_row(console, number, parts, tokenizer, loaded.data.sequence_length)


def plain_console() -> Console:
    """Colours on a terminal; in a pipe lines that are not broken at 80 characters."""
    width = None if sys.stdout.isatty() else 1000  # in a file nothing is wrapped: a path in two lines cannot be found again
    return Console(soft_wrap=True, highlight=False, width=width)


def chosen_sources(recipe: Recipe, name: str | None) -> Iterator[tuple[str, DocumentSource]]:
    """All sources and held-out sets, or the one of that name."""
    keyed = list(keyed_sources(recipe.data, recipe.evaluation))
    names = [reported_name(one) for _, one in keyed]
    if name is not None and name not in names:
        raise RecipeError(f"no source is called `{name}`.{did_you_mean(name, names)} There is: {', '.join(names)}.")
    yield from ((key, one) for key, one in keyed if name in (None, reported_name(one)))


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
            f"{source.path}: {sum(row['rows'] for row in bad):,} bad row(s). Fix them ({key}.path), or write `data.on_bad_row: skip`."
        )
    refuse_too_many(bad, documents, data.max_bad_share, source.path, key)
    if documents == sum(counts.empty for counts in files):
        raise DataError(f"{source.path}: no document with any text. Set `{key}.path`.")


def show_counts(console: Console, name: str, files: Sequence[FileCounts]) -> None:
    """A row per file: those with bad rows, and as many of the others as fit."""
    table = Table(
        Column("file", overflow="fold"), "documents", "of these empty", "characters", "bad rows", "why", title=name, title_justify="left"
    )
    shown = sorted(range(len(files)), key=lambda number: not files[number].bad)[:FILES_SHOWN]
    for counts in [files[number] for number in sorted(shown)]:
        table.add_row(escape(counts.path), *numbers_of([counts]), reasons(counts.bad), style="yellow" if counts.bad else None)
    if len(files) > 1:
        table.add_row(f"all {len(files):,} files", *numbers_of(files), reasons([row for counts in files for row in counts.bad]))
    console.print(table)


def numbers_of(files: Sequence[FileCounts]) -> list[str]:
    """Documents, empty ones, characters and bad rows of all of them."""
    rows = zip(*((counts.documents, counts.empty, counts.num_characters, counts.num_bad) for counts in files), strict=True)
    return [f"{sum(numbers):,}" for numbers in rows]


def show_seen(console: Console, seen: Seen) -> None:
    """Kept and dropped documents by reason, each with an example."""
    table = Table("documents", "become", Column("for example", overflow="fold"), "which reads", title=seen.name, title_justify="left")
    if seen.kept:
        table.add_row(f"{len(seen.kept):,}", "kept", escape(seen.kept[0].where), escape(excerpt(seen.kept[0].text)))
    for reason, count in seen.lost.most_common():
        example = seen.examples[reason]
        table.add_row(f"{count:,}", f"dropped: {escape(reason)}", escape(example.where), escape(excerpt(example.text)), style="yellow")
    console.print(table)


def show_row(console: Console, number: int, parts: Sequence[RowPart], tokenizer: PreTrainedTokenizerBase, length: int) -> None:
    """A packed row: each document in another colour, and `|` between them for pipes."""
    padding = length - sum(len(part.ids) for part in parts)
    console.print(f"row {number}: {len(parts)} document(s), {length - padding:,} of {length:,} tokens, {padding:,} padding")
    line = Text("  ")
    for place, part in enumerate(parts):
        if place:
            line.append(" | ")
        text = excerpt(str(tokenizer.decode(part.ids.tolist())))
        line.append(f"{part.where} ({len(part.ids):,}): {text}", style=COLOURS[place % len(COLOURS)])
    if padding:
        line.append(f" | padding ({padding:,})", style="dim")
    console.print(line)


def excerpt(text: str) -> str:
    """The beginning and the end of a text on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT else f"{flat[: EXCERPT * 2 // 3]} ... {flat[-EXCERPT // 3 :]}"
