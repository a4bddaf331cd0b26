"""`cpt data preview`: which documents a run keeps and drops, and how they are packed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from cpt.commands.data_check import OneSource, Overrides, RecipePath, chosen_sources
from cpt.console import open_console
from cpt.data.examples.encoder import CONTEXT, LEARNED, ROW, UNWANTED, ExampleEncoder, encoder_of
from cpt.data.readers.documents import BadRow, DocumentView
from cpt.data.readers.filters import build_filters, build_transforms, sift
from cpt.data.readers.sources import pieces_of, read_piece
from cpt.data.rows.open_sources import filters_of, transforms_of
from cpt.data.rows.packing import pack
from cpt.data.store.tokenization import DocumentEncoder, Ids
from cpt.recipe.load import load_recipe
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data, DocumentSource
from cpt.tokenizer.load import load_tokenizer

COMMANDS = {  # name -> module:function
    "check": "cpt.commands.data_check:check_command",
    "preview": "cpt.commands.data_preview:preview_command",
    "ingest": "cpt.commands.data_ingest:ingest_command",
    "rewrite": "cpt.commands.data_ingest:rewrite_command",
}


@dataclass(frozen=True)
class PreviewedExample:
    """A document or row, with its place."""

    where: str
    text: str


@dataclass
class Seen:
    """What became of the first documents of a source."""

    name: str
    kept: list[PreviewedExample] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)
    """Why it is not kept -> documents and rows; bad rows as `bad row: null`."""
    examples: dict[str, PreviewedExample] = field(default_factory=dict)
    """Why it is not kept -> the first one."""

    def lose(self, reason: str, where: str, text: str) -> None:
        self.lost[reason] += 1
        self.examples.setdefault(reason, PreviewedExample(where, text))


@dataclass(frozen=True)
class RowPart:
    """A document, or a piece of one, in a packed row."""

    where: str
    ids: Ids


def see_source(
    data: Data, source: DocumentSource, key: str, num_documents: int, encoder: DocumentEncoder | None = None
) -> Seen:
    """Read the first documents and sort them; a bad row ends nothing here.

    Args:
        encoder: the source's; what it cannot encode is dropped too.
    """
    seen = Seen(reported_name(source))
    transforms = build_transforms(transforms_of(data, source, key))
    filters = build_filters(filters_of(data, source, key))
    items = (item for piece in pieces_of(source, key) for item in read_piece(source, piece, key))
    for item in islice(items, min(num_documents, source.max_documents or num_documents)):
        if isinstance(item, BadRow):
            seen.lose(f"bad row: {item.reason}", item.where, item.detail)
            continue
        view: DocumentView = {"text": item.text, "source": seen.name, "where": item.where}
        for text, dropped in sift(view, transforms, filters):
            reason = dropped if dropped is not None or encoder is None else encoder.reason_to_drop(text)
            if reason is None:
                seen.kept.append(PreviewedExample(item.where, text))
            else:
                seen.lose(reason, item.where, text)
    return seen


def packed_rows(
    kept: Sequence[PreviewedExample], encoder: DocumentEncoder, data: Data, seed: int, num_rows: int
) -> Iterator[tuple[int, list[RowPart]]]:
    """Some of the rows that these documents are packed into, by number; the run's own rows hold documents of the whole
    source.

    The first rows are the pieces of long documents, the last ones what was left over: the chosen ones are spread
    evenly.
    """
    if not kept or not num_rows:
        return
    ids, lengths = encoder.encode([example.text for example in kept])
    begins = lengths.cumsum() - lengths
    packing = pack(begins, lengths, data.sequence_length, data.packing, seed, data.stride)
    for row in np.unique(np.linspace(0, packing.num_rows - 1, num_rows).round().astype(int)).tolist():
        starts, sizes = packing.pieces(row, epoch=0)
        documents = np.searchsorted(begins, starts, "right") - 1
        pieces = zip(documents.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        yield row, [RowPart(kept[number].where, ids[start : start + size]) for number, start, size in pieces]


MARKS = {CONTEXT: ("", "", "dim"), LEARNED: ("[", "]", "green"), UNWANTED: ("{", "}", "red")}
"""What stands around each token, and its style."""
MEANINGS = {LEARNED: "learned", UNWANTED: "rejected or unwanted"}


def show_examples(
    console: Console,
    kept: Sequence[PreviewedExample],
    encoder: ExampleEncoder,
    tokenizer: PreTrainedTokenizerBase,
    number: int,
) -> None:
    """The first examples, token by token: `[learned]` and `{rejected}`."""
    for example in kept[:number]:
        ids, _, segments = encoder.encode_segments([example.text])
        counts = {what: int((segments == segment).sum()) for segment, what in MEANINGS.items()}
        counted = "".join(f", {count:,} {what}" for what, count in counts.items() if count)
        console.print(f"{example.where}: {int((segments != ROW).sum()):,} tokens{counted}", markup=False)
        line = Text("  ")
        for token, segment in zip(ids.tolist(), segments.tolist(), strict=True):
            if segment == ROW:
                break
            before, after, style = MARKS[segment]
            text = str(tokenizer.decode([token])).replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
            line.append(f"{before}{text}{after}", style=style)
        console.print(line)


EXCERPT = 60  # characters of a document


def preview_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    source: OneSource = None,
    rows: Annotated[int, typer.Option(min=0, help="Packed rows, or examples, to show of each source.")] = 3,
    documents: Annotated[
        int, typer.Option(min=1, help="How many documents of each source to look at, from its beginning.")
    ] = 1000,
) -> None:
    """Show which of the first documents a run keeps, which it drops and why, and how they are packed; of examples what
    is learned.

    Example: cpt data preview recipe.yaml --rows 5
    """
    loaded, console = load_recipe(recipe, overrides or ()), open_console()
    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    plain = DocumentEncoder(tokenizer)
    for key, one in chosen_sources(loaded, source):
        encoder = encoder_of(one, plain, key)
        seen = see_source(loaded.data, one, key, documents, encoder)
        show_seen(console, seen)
        if isinstance(encoder, ExampleEncoder):
            show_examples(console, seen.kept, encoder, tokenizer, rows)
            continue
        for number, parts in packed_rows(seen.kept, encoder, loaded.data, loaded.seed, rows):
            show_row(console, number, parts, tokenizer, loaded.data.sequence_length)


def show_seen(console: Console, seen: Seen) -> None:
    """Kept and dropped documents by reason, each with an example."""
    table = Table("documents", "become", Column("for example", overflow="fold"), "which reads", title=seen.name)
    if seen.kept:
        table.add_row(f"{len(seen.kept):,}", "kept", escape(seen.kept[0].where), escape(excerpt(seen.kept[0].text)))
    for reason, count in seen.lost.most_common():
        cells = f"dropped: {reason}", seen.examples[reason].where, excerpt(seen.examples[reason].text)
        table.add_row(f"{count:,}", *map(escape, cells), style="yellow")
    console.print(table)


def show_row(
    console: Console, number: int, parts: Sequence[RowPart], tokenizer: PreTrainedTokenizerBase, length: int
) -> None:
    """A packed row, with `|` between its documents."""
    padding = length - sum(len(part.ids) for part in parts)
    decoded = [excerpt(str(tokenizer.decode(part.ids.tolist()))) for part in parts]
    texts = [f"{part.where} ({len(part.ids):,}): {text}" for part, text in zip(parts, decoded, strict=True)]
    texts += [f"padding ({padding:,})"] if padding else []
    console.print(f"row {number}: {len(parts)} document(s), {length - padding:,} of {length:,} tokens")
    console.print(f"  {' | '.join(texts)}", markup=False)


def excerpt(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT else f"{flat[: EXCERPT * 2 // 3]} ... {flat[-EXCERPT // 3 :]}"
