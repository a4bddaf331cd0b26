"""`cpt data check`: every row of the documents, before a run reads them."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
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
from cpt.data.examples.gate import CUT, REPEATED, WRONG, Findings, Inspector, inspect_source, missing_tokens
from cpt.data.open_sources import filters_of, keyed_sources, transforms_of
from cpt.data.readers.documents import Document, Listed, Piece, absurd_share, count_reasons, listed, refuse_too_many
from cpt.data.readers.forms import form_of_source, sections_of
from cpt.data.readers.sources import files_with_sizes, pieces_of, read_piece
from cpt.data.store.parallel import map_in_order, num_workers
from cpt.data.store.tokenization import DocumentEncoder
from cpt.errors import CptError, DataError, RecipeError
from cpt.extend import did_you_mean
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_document_file
from cpt.recipe.schema import Data, DocumentSource, Recipe, Source
from cpt.recipe.sense_data import reported_name

POOL_BYTES = 32 * 2**20  # of files; below, starting processes takes longer than the work
PIECE_BYTES = 16 * 2**20


@dataclass
class FileCounts:
    """What is in a file, or in a part of it."""

    path: str
    documents: int = 0
    empty: int = 0
    """Documents without any visible character, among the others."""
    num_characters: int = 0
    longest: tuple[str, int] = ("", 0)
    """Where the longest document stands, and its characters."""
    bad: list[Listed] = field(default_factory=list)

    @property
    def num_bad(self) -> int:
        return sum(row["rows"] for row in self.bad)


def count_source(source: DocumentSource, key: str) -> Iterator[FileCounts]:
    """The counts of each file, in order, each as soon as it is read.

    Raises:
        CptError: nothing is there, or a file cannot be read at all.
    """
    pieces = pieces_of(source, key, PIECE_BYTES)
    if source.max_documents is None:
        parts = map_in_order(lambda: partial(count_piece, source, key), pieces, workers_for(source, key, pieces))
    else:
        parts = count_first(source, key, pieces, source.max_documents)
    for path, of_file in groupby(parts, key=lambda part: part.path):
        yield sum_up(path, of_file)


def count_first(source: DocumentSource, key: str, pieces: Sequence[Piece], num_documents: int) -> Iterator[FileCounts]:
    """One piece after the other, until there are as many documents as the source takes."""
    for piece in pieces:
        part = count_piece(source.model_copy(update={"max_documents": num_documents}), key, piece)
        yield part
        num_documents -= part.documents
        if num_documents <= 0:
            return


def workers_for(source: DocumentSource, key: str, pieces: Sequence[Piece]) -> int:
    """How many processes pay."""
    num_bytes = sum(size for _, size in files_with_sizes(source, key))
    return num_workers() if len(pieces) > 1 and num_bytes >= POOL_BYTES else 0


def count_piece(source: DocumentSource, key: str, piece: Piece) -> FileCounts:
    counts, longest = FileCounts(piece.path), 0
    for item in read_piece(source, piece, key):
        if not isinstance(item, Document):
            counts.bad.append(listed(item))
            continue
        counts.documents += 1
        counts.empty += not item.text or item.text.isspace()
        counts.num_characters += len(item.text)
        if len(item.text) > longest:
            longest, longest_document = len(item.text), item
    if longest:
        counts.longest = longest_document.where, longest
    return counts


def sum_up(path: str, parts: Iterator[FileCounts]) -> FileCounts:
    whole = FileCounts(path)
    for part in parts:
        whole.documents += part.documents
        whole.empty += part.empty
        whole.num_characters += part.num_characters
        whole.longest = max(whole.longest, part.longest, key=lambda longest: longest[1])
        whole.bad += part.bad
    return whole


def reasons(bad: Sequence[Listed]) -> str:
    """`null: 3, not valid JSON: 1`."""
    return ", ".join(f"{reason}: {count:,}" for reason, count in Counter(count_reasons(bad)).most_common())


# --- showing ---


RecipePath = Annotated[Path, typer.Argument(help="The recipe's YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key.path=value, any key of the recipe.")]
OneSource = Annotated[str | None, typer.Option(help="Only the source of this name.")]


def chosen_sources(recipe: Recipe, name: str | None) -> Iterator[tuple[str, DocumentSource]]:
    keyed = list(keyed_sources(*sections_of(recipe)))
    names = [reported_name(one) for _, one in keyed]
    if name is not None and name not in names:
        raise RecipeError(f"no source is called `{name}`.{did_you_mean(name, names)} There is: {', '.join(names)}.")
    yield from ((key, one) for key, one in keyed if name in (None, reported_name(one)))


# --- example gate ---


ROWS_SHOWN = 5
GATE_PIECE_BYTES = 2 * 2**20


@dataclass
class ExampleGate:
    """Looks through the sources of examples of a recipe.

    Args:
        truncated_share: of examples; more that do not fit into `data.sequence_length` are a mistake.
    """

    console: Console
    recipe: Recipe
    truncated_share: float

    @cached_property
    def encoder(self) -> DocumentEncoder:
        from cpt.tokenizer.load import load_tokenizer  # seconds

        return DocumentEncoder(load_tokenizer(self.recipe.tokenizer, self.recipe.model))

    def check(self, source: DocumentSource, key: str) -> None:
        """Show what is found in a source.

        Raises:
            DataError: something in it makes training wrong.
            RecipeError: the tokenizer does not go with its template.
        """
        encoder = encoder_of(source, self.encoder, key)
        assert isinstance(encoder, ExampleEncoder)
        if missing := missing_tokens(encoder):
            raise RecipeError(
                f"`tokenizer.path`: the chat template of `{encoder.name}` writes {', '.join(missing)}, which is no"
                " token of the tokenizer: it would be spelled in pieces. Add it as a special token, or take the"
                " template that belongs to the tokenizer."
            )
        lists = filters_of(self.recipe.data, source, key), transforms_of(self.recipe.data, source, key)
        pieces = pieces_of(source, key, GATE_PIECE_BYTES)
        inspector = Inspector(source, key, *lists, encoder, self.recipe.data.sequence_length)
        found = inspect_source(
            inspector, pieces, num_workers() if len(pieces) * GATE_PIECE_BYTES >= POOL_BYTES // 4 else 0
        )
        if self.recipe.data.deduplicate is not None:
            found.counts.pop(REPEATED, None)
        self.show(reported_name(source), found)
        self.judge(source, key, found)

    def show(self, name: str, found: Findings) -> None:
        """A line for each kind, with its first rows."""
        if not found.counts:
            return
        table = Table(
            "rows",
            "fault",
            Column("which", overflow="fold"),
            title=f"{name}: {found.examples:,} examples",
            title_justify="left",
        )
        for kind, count in found.counts.most_common():
            more = f" and {count - ROWS_SHOWN:,} more" if count > ROWS_SHOWN else ""
            table.add_row(
                f"{count:,}", escape(kind), escape(", ".join(found.where(kind, ROWS_SHOWN)) + more), style="yellow"
            )
        self.console.print(table)

    def judge(self, source: DocumentSource, key: str, found: Findings) -> None:
        """Whether a run would learn what is wrong.

        Raises:
            DataError: with the kinds and their first rows.
        """
        cut = sum(found.counts[kind] for kind in CUT)
        is_much = cut > self.truncated_share * max(1, found.examples)
        wrong = [kind for kind in found.counts if kind in WRONG or kind in CUT and is_much]
        if not wrong:
            return
        told = "; ".join(f"{found.counts[kind]:,} x {kind} ({found.where(kind, 1)[0]})" for kind in wrong)
        much = (
            f" {cut / found.examples:.1%} do not fit into `data.sequence_length`: raise it (or --truncated-share)."
            if is_much
            else ""
        )
        raise DataError(f"{source.path}: {told}. Fix the rows or drop them by a filter (`{key}.filters`).{much}")


# --- check ---


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
    rows = zip(
        *((counts.documents, counts.empty, counts.num_characters, counts.num_bad) for counts in files), strict=True
    )
    return [f"{sum(numbers):,}" for numbers in rows]
