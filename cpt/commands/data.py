"""`cpt data`: preview a recipe's rows."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from xxhash import xxh3_64_intdigest

from cpt.command_line import Overrides, RecipePath
from cpt.data.examples.encoder import CONTEXT, LEARNED, ROW, UNWANTED, ExampleEncoder, encoder_of
from cpt.data.readers.account import Losses, format_account, with_held_out
from cpt.data.readers.columns import form_of_source, sections_of
from cpt.data.readers.documents import BadRow
from cpt.data.readers.filters import sieve_of, sift
from cpt.data.readers.sources import pieces_of, read_piece
from cpt.data.rows.contamination import is_refused
from cpt.data.rows.selection import is_held_out, longest_held_out
from cpt.data.store.tokenization import DocumentEncoder
from cpt.formatting import open_console
from cpt.recipe.load import load_recipe
from cpt.recipe.rules import keyed_sources, reported_name
from cpt.recipe.schema import Data, DocumentSource, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMANDS = {  # name -> module:function
    "check": "cpt.commands.data_check:check_command",
    "preview": "cpt.commands.data:preview_command",
    "ingest": "cpt.contrib.documents.command:command",
    "rewrite": "cpt.contrib.rewriting.command:command",
    "generate-replay": "cpt.contrib.rewriting.generate_replay:command",
}
MARKS = {CONTEXT: ("", "", "dim"), LEARNED: ("[", "]", "green"), UNWANTED: ("{", "}", "red")}
"""The brackets around each token, and its style."""
MEANINGS = {LEARNED: "learned", UNWANTED: "rejected or unwanted"}
EXCERPT = 60  # characters of a document
ESCAPED = str.maketrans({"\n": "\\n", "\t": "\\t", "\r": "\\r"})


@dataclass(frozen=True)
class PreviewedExample:
    """A document or row, with its location."""

    where: str
    text: str


def see_source(
    data: Data,
    source: DocumentSource,
    key: str,
    num_documents: int,
    encoder: DocumentEncoder | None = None,
    losses: Losses | None = None,
) -> dict[str | None, list[PreviewedExample]]:
    """Read the first documents: reason for dropping -> these documents, and None -> those that are kept. A bad row
    does not end the preview; its reason reads like `bad row: null`. All that is dropped is counted in `losses`."""
    by_reason: dict[str | None, list[PreviewedExample]] = defaultdict(list)
    if losses is None:
        losses = Losses(counts_lost_files=True)
    functions = sieve_of(data, source, key).functions()
    items = (item for piece in pieces_of(source, key) for item in read_piece(source, piece, key))
    for item in islice(items, min(num_documents, source.max_documents or num_documents)):
        if isinstance(item, BadRow):
            by_reason[f"bad row: {item.reason}"].append(PreviewedExample(item.where, item.detail))
            losses.drop_row(item, key)
            continue
        results = list(sift(item, reported_name(source), *functions))
        losses.count_transformed(item.text, [text for text, _ in results])
        for text, dropped in results:
            reason = dropped
            if reason is None and encoder is not None:
                reason = encoder.reason_to_drop(text)
            by_reason[reason].append(PreviewedExample(item.where, text))
            if reason is not None:
                losses.drop(text, reason)
    return by_reason


def preview_command(
    recipe: RecipePath,
    overrides: Overrides = None,
    rows: Annotated[
        int, typer.Option(min=0, help="Packed rows, or examples, to show of each source.")
    ] = 3,
    documents: Annotated[int, typer.Option(min=1, help="Documents to read of each source.")] = 1000,
) -> None:
    """Show which of the first documents a run keeps, which it drops and why, and how they are packed; of examples, the
    tokens that are learned.

    Example: cpt data preview recipe.yaml --rows 5
    """
    loaded = load_recipe(recipe, overrides or ())

    from cpt.tokenizer.load import load_tokenizer  # transformers

    console = open_console()
    tokenizer = load_tokenizer(loaded.tokenizer, loaded.model)
    plain_encoder = DocumentEncoder(tokenizer)
    for key, source in keyed_sources(*sections_of(loaded)):
        encoder = encoder_of(source, plain_encoder, key)
        losses = Losses(counts_lost_files=True)
        by_reason = see_source(loaded.data, source, key, documents, encoder, losses)
        kept_documents = by_reason.pop(None, [])
        name = reported_name(source)
        account = losses.account(
            f"what was read of {name}", len(kept_documents), num_bytes(kept_documents)
        )
        held_out: list[PreviewedExample] = []
        share = loaded.evaluation.held_out_share
        if share is not None and key.startswith("data.sources"):
            kept_documents, held_out = split_held_out(kept_documents, share, form_of_source(source))
            account = with_held_out(account, len(held_out), num_bytes(held_out))
        console.print(table_of_outcomes(name, kept_documents, held_out, by_reason))
        console.print(format_account(account), markup=False, highlight=False)
        if isinstance(encoder, ExampleEncoder):
            show_examples(console, kept_documents[:rows], encoder, tokenizer)
        elif kept_documents and rows:
            show_rows(console, kept_documents, encoder, tokenizer, loaded, rows)
    show_comparisons(console, loaded, recipe)


def num_bytes(documents: Iterable[PreviewedExample]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def table_of_outcomes(
    name: str,
    kept_documents: Sequence[PreviewedExample],
    held_out: Sequence[PreviewedExample],
    dropped: Mapping[str | None, Sequence[PreviewedExample]],
) -> Table:
    """A row for each thing that becomes of documents, with the first of them; the most frequent reasons first."""
    table = Table(
        "documents", "become", Column("for example", overflow="fold"), "which reads", title=name
    )

    def add_row(outcome: str, documents: Sequence[PreviewedExample], style: str | None) -> None:
        if documents:
            cells = (outcome, documents[0].where, excerpt(documents[0].text))
            table.add_row(f"{len(documents):,}", *map(escape, cells), style=style)

    add_row("kept", kept_documents, None)
    add_row("held out", held_out, None)
    for reason, documents in sorted(dropped.items(), key=lambda item: -len(item[1])):
        add_row(f"dropped: {reason}", documents, "yellow")
    return table


def show_comparisons(console: Console, recipe: Recipe, path: Path) -> None:
    """Print what drops documents by comparing all of them, which a preview does not read."""
    from cpt.evaluation.sets import has_held_out  # torch

    comparisons = []
    if recipe.data.deduplicate is not None:
        comparisons.append("`data.deduplicate`")
    if has_held_out(recipe) and not is_refused(recipe.data):
        comparisons.append("decontamination against held-out text")
    if comparisons:
        line = f"Not applied here: {' and '.join(comparisons)}. `cpt mixture {path}` counts what they drop."
        console.print(line, markup=False)


def split_held_out(
    documents: Sequence[PreviewedExample], share: float, form: str
) -> tuple[list[PreviewedExample], list[PreviewedExample]]:
    """The documents that a run trains on, and those that it holds out; the limit on very long ones is that of these
    documents, not of the whole source."""
    raw = [document.text.encode() for document in documents]
    hashes = np.array(list(map(xxh3_64_intdigest, raw)), np.uint64)
    sizes = np.array(list(map(len, raw)), np.int64)
    longest = None
    if form == "document":
        longest = longest_held_out(int(sizes.sum()), len(sizes), share)
    flags = is_held_out(hashes, sizes, share, longest).tolist()
    trained = [document for document, flag in zip(documents, flags, strict=True) if not flag]
    held_out = [document for document, flag in zip(documents, flags, strict=True) if flag]
    return trained, held_out


def show_examples(
    console: Console,
    examples: Sequence[PreviewedExample],
    encoder: ExampleEncoder,
    tokenizer: "PreTrainedTokenizerBase",
) -> None:
    """Print examples token by token: `[learned]` and `{rejected}`."""
    for example in examples:
        ids, _, segments = encoder.encode_segments([example.text])
        title = f"{example.where}: {int((segments != ROW).sum()):,} tokens"
        for segment, meaning in MEANINGS.items():
            count = int((segments == segment).sum())
            if count:
                title += f", {count:,} {meaning}"
        console.print(title, markup=False)
        line = Text("  ")
        for token, segment in zip(ids.tolist(), segments.tolist(), strict=True):
            if segment == ROW:
                break
            before, after, style = MARKS[segment]
            text = str(tokenizer.decode([token])).translate(ESCAPED)
            line.append(f"{before}{text}{after}", style=style)
        console.print(line)


def show_rows(
    console: Console,
    kept_documents: Sequence[PreviewedExample],
    encoder: DocumentEncoder,
    tokenizer: "PreTrainedTokenizerBase",
    recipe: Recipe,
    num_rows: int,
) -> None:
    """Print some rows that these documents are packed into, with `|` between documents.

    The first rows hold pieces of long documents, the last ones the remainders: the printed ones are spread evenly.
    The run's own rows hold documents of the whole source.
    """
    from cpt.data.rows.packing import pack  # torch

    data = recipe.data
    ids, lengths = encoder.encode([document.text for document in kept_documents])
    begins = lengths.cumsum() - lengths
    packing = pack(begins, lengths, data.sequence_length, data.packing, recipe.seed, data.stride)
    spread_rows = np.linspace(0, packing.num_rows - 1, num_rows).round().astype(int)
    for row in np.unique(spread_rows).tolist():
        starts, sizes = packing.pieces(row, epoch=0)
        documents = np.searchsorted(begins, starts, "right") - 1
        parts = []
        for document, start, size in zip(documents, starts.tolist(), sizes.tolist(), strict=True):
            text = excerpt(decoded(ids[start : start + size], encoder, tokenizer))
            parts.append(f"{kept_documents[document].where} ({size:,}): {text}")
        num_used = int(sizes.sum())
        console.print(
            f"row {row}: {len(parts)} document(s), {num_used:,} of {data.sequence_length:,} tokens"
        )
        if num_used < data.sequence_length:
            parts.append(f"padding ({data.sequence_length - num_used:,})")
        console.print(f"  {' | '.join(parts)}", markup=False)


def decoded(
    ids: NDArray[Any], encoder: DocumentEncoder, tokenizer: "PreTrainedTokenizerBase"
) -> str:
    """The text of tokens; special tokens are in double brackets, unlike those that are spelled in the text."""
    changes = np.flatnonzero(np.diff(encoder.is_special[ids])) + 1
    parts = []
    for part in np.split(ids, changes):
        text = str(tokenizer.decode(part.tolist()))
        parts.append(f"⟦{text}⟧" if encoder.is_special[part[0]] else text)
    return "".join(parts)


def excerpt(text: str) -> str:
    flat = " ".join(text.split())
    if len(flat) <= EXCERPT:
        return flat
    return f"{flat[: EXCERPT * 2 // 3]} ... {flat[-EXCERPT // 3 :]}"
