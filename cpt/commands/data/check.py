"""`cpt data check`: every row of the documents, before a run reads them."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from cpt.command_line import refuse_ignored
from cpt.console import open_console
from cpt.data.examples.encoder import ExampleEncoder
from cpt.data.examples.encoders import encoder_of
from cpt.data.examples.gate import CUT, REPEATED, WRONG, ExampleReport, Inspector, inspect_source, missing_tokens
from cpt.data.open_sources import filters_of, keyed_sources, transforms_of
from cpt.data.readers.documents import (
    BadRow,
    Document,
    Listed,
    Piece,
    absurd_share,
    count_reasons,
    listed,
    refuse_too_many,
)
from cpt.data.readers.forms import form_of_source, sections_of
from cpt.data.readers.sources import pieces_of, read_piece
from cpt.data.store.parallel import map_in_order, num_workers
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import CptError, DataError, RecipeError
from cpt.plugins import did_you_mean
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_document_file
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, DocumentSource, Recipe, Source

PIECE_BYTES, EXAMPLE_PIECE_BYTES = 16 * 2**20, 2 * 2**20  # examples are encoded, which takes longer
PIECES_ALONE = 2  # with more pieces, starting processes is worth it
BAD_ROWS_SHOWN, EXAMPLES_SHOWN = 20, 5
TRUNCATED_SHARE = 0.05

RecipePath = Annotated[Path, typer.Argument(help="The recipe's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")]
OneSource = Annotated[str | None, typer.Option(help="Only the source of this name.")]


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
    """Read every row of every source and report bad rows. Exit code 2: a run would stop at them, or learn what is
    wrong.

    Example: cpt data check recipe.yaml --output bad_rows.jsonl
    """
    console, loaded = open_console(), None
    if recipe.is_dir() or is_document_file(recipe.name):
        if overrides or source:
            raise RecipeError(f"{recipe} holds documents; key=value and --source need a recipe.")
        data = Data(sources=[Source(path=str(recipe))])
        sources: list[tuple[str, DocumentSource]] = [("data.sources[0]", data.sources[0])]
    else:
        loaded = load_recipe(recipe, overrides or ())
        data, sources = loaded.data, list(chosen_sources(loaded, source))
    has_examples = any(form_of_source(one) != "document" for _, one in sources)
    refuse_ignored(
        {"--truncated-share": truncated_share != TRUNCATED_SHARE and not has_examples},
        "on documents: a long one continues in the next row",
    )

    @cache
    def plain_encoder() -> DocumentEncoder:
        from cpt.tokenizer.load import load_tokenizer  # seconds

        assert loaded is not None
        return DocumentEncoder(load_tokenizer(loaded.tokenizer, loaded.model))

    found: list[Listed] = []
    mistakes: list[CptError] = []
    for key, one in sources:
        checks: list[Callable[[], None]] = [partial(check_source, console, data, one, key, found)]
        if loaded is not None and form_of_source(one) != "document":  # the good rows, also where others are bad
            checks.append(partial(check_examples, console, loaded, one, key, plain_encoder, truncated_share))
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


def chosen_sources(recipe: Recipe, name: str | None) -> Iterator[tuple[str, DocumentSource]]:
    keyed = list(keyed_sources(*sections_of(recipe)))
    names = [reported_name(one) for _, one in keyed]
    if name is not None and name not in names:
        raise RecipeError(f"no source is called `{name}`.{did_you_mean(name, names)} There is: {', '.join(names)}.")
    yield from ((key, one) for key, one in keyed if name in (None, reported_name(one)))


# --- documents ---


@dataclass
class Counts:
    """What is in a source, or in a piece of it."""

    documents: int = 0
    empty: int = 0
    """Documents without any visible character, among the others."""
    num_characters: int = 0
    longest: tuple[str, int] = ("", 0)
    """The place of the longest document, and its characters."""
    bad: list[Listed] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        return sum(row["rows"] for row in self.bad)


def check_source(console: Console, data: Data, source: DocumentSource, key: str, found: list[Listed]) -> None:
    """Count and show what is in a source, and add its bad rows to `found`.

    Raises:
        CptError: a run would stop at this source.
    """
    name, counts = reported_name(source), count_source(source, key)
    found += counts.bad
    table = Table("source", "documents", "of these empty", "characters", "bad rows", "why")
    numbers = counts.documents, counts.empty, counts.num_characters, counts.num_bad
    why = ", ".join(f"{reason}: {count:,}" for reason, count in Counter(count_reasons(counts.bad)).most_common())
    table.add_row(escape(name), *(f"{number:,}" for number in numbers), why, style="yellow" if why else None)
    console.print(table)
    for row in counts.bad[:BAD_ROWS_SHOWN]:
        byte = "" if row["byte"] is None else f" (byte {row['byte']:,})"
        console.print(f"  {row['where']}: {row['detail']}{byte}", style="yellow", markup=False)
    if len(counts.bad) > BAD_ROWS_SHOWN:
        console.print(f"  ... and {len(counts.bad) - BAD_ROWS_SHOWN:,} more; --output FILE lists all of them")
    where, longest = counts.longest
    if giant := absurd_share(name, where, longest, counts.num_characters, counts.documents, "characters"):
        console.print(giant, style="yellow", markup=False)
    if counts.bad and data.on_bad_row == "error":
        raise DataError(
            f"{source.path}: {counts.num_bad:,} bad row(s). Fix them ({key}.path), or write `data.on_bad_row: skip`."
        )
    refuse_too_many(counts.num_bad, counts.documents, data.max_bad_share, source.path, key, counts.bad)
    if counts.documents == counts.empty:
        raise DataError(f"{source.path}: no document with any text. Set `{key}.path`.")


def count_source(source: DocumentSource, key: str) -> Counts:
    """Read a source, in several processes if it is large.

    Raises:
        CptError: the source is missing, or a file cannot be read at all.
    """
    pieces = pieces_of(source, key, PIECE_BYTES)
    if source.max_documents is not None:
        items = chain.from_iterable(read_piece(source, piece, key) for piece in pieces)
        return count_items(items, source.max_documents)
    whole = Counts()
    for part in map_in_order(lambda: partial(count_piece, source, key), pieces, workers_for(pieces)):
        whole.documents += part.documents
        whole.empty += part.empty
        whole.num_characters += part.num_characters
        whole.longest = max(whole.longest, part.longest, key=lambda longest: longest[1])
        whole.bad += part.bad
    return whole


def workers_for(pieces: Sequence[Piece]) -> int:
    return num_workers() if len(pieces) > PIECES_ALONE else 0


def count_piece(source: DocumentSource, key: str, piece: Piece) -> Counts:
    return count_items(read_piece(source, piece, key))


def count_items(items: Iterable[Document | BadRow], most: int | None = None) -> Counts:
    """Count until the end, or until there are `most` documents."""
    counts, longest = Counts(), 0
    for item in items:
        if not isinstance(item, Document):
            counts.bad.append(listed(item))
            continue
        counts.documents += 1
        counts.empty += not item.text or item.text.isspace()
        counts.num_characters += len(item.text)
        if len(item.text) > longest:
            longest, longest_document = len(item.text), item
        if counts.documents == most:
            break
    if longest:
        counts.longest = longest_document.where, longest
    return counts


# --- examples ---


def check_examples(
    console: Console,
    recipe: Recipe,
    source: DocumentSource,
    key: str,
    plain_encoder: Callable[[], DocumentEncoder],
    truncated_share: float,
) -> None:
    """Show what is found in a source of examples.

    Args:
        truncated_share: of examples; more that do not fit into `data.sequence_length` are a mistake.

    Raises:
        DataError: something in it makes training wrong.
        RecipeError: the tokenizer does not go with its template.
    """
    encoder = encoder_of(source, plain_encoder(), key)
    assert isinstance(encoder, ExampleEncoder)
    if missing := missing_tokens(encoder):
        raise RecipeError(
            f"`tokenizer.path`: the chat template of `{encoder.name}` writes {', '.join(missing)}, which is no token"
            " of the tokenizer. Add it as a special token, or use the template that belongs to the tokenizer."
        )
    lists = filters_of(recipe.data, source, key), transforms_of(recipe.data, source, key)
    pieces = pieces_of(source, key, EXAMPLE_PIECE_BYTES)
    inspector = Inspector(source, key, *lists, encoder, recipe.data.sequence_length)
    found = inspect_source(inspector, pieces, workers_for(pieces))
    if recipe.data.deduplicate is not None:
        found.counts.pop(REPEATED, None)
    if found.counts:
        show_findings(console, reported_name(source), found)
    cut = sum(found.counts[kind] for kind in CUT)
    is_much = cut > truncated_share * max(1, found.examples)
    if wrong := [kind for kind in found.counts if kind in WRONG or kind in CUT and is_much]:
        listing = "; ".join(f"{found.counts[kind]:,} x {kind} ({found.where(kind, 1)[0]})" for kind in wrong)
        much = (
            f" {cut / found.examples:.1%} do not fit into `data.sequence_length`: raise it (or --truncated-share)."
            if is_much
            else ""
        )
        raise DataError(f"{source.path}: {listing}. Fix the rows or drop them by a filter (`{key}.filters`).{much}")


def show_findings(console: Console, name: str, found: ExampleReport) -> None:
    """A line for each kind, with its first rows."""
    table = Table("rows", "fault", Column("which", overflow="fold"), title=f"{name}: {found.examples:,} examples")
    for kind, count in found.counts.most_common():
        more = f" and {count - EXAMPLES_SHOWN:,} more" if count > EXAMPLES_SHOWN else ""
        where = escape(", ".join(found.where(kind, EXAMPLES_SHOWN)) + more)
        table.add_row(f"{count:,}", escape(kind), where, style="yellow")
    console.print(table)
