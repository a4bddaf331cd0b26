"""Pack documents into rows of exactly `sequence_length` tokens, without losing a token.

best_fit: the fullest row with enough space takes the next document, longest first (arxiv.org/abs/2404.10830); a
document longer than a row is cut into full rows and a rest. concatenate: documents end to end, cut where a row is
full. sliding_window: one window every `stride` tokens of a document, packed by best fit. none: one row per document,
or piece of one. token_budget: a row is a batch of documents of similar length, padded to the longest, for models
that cannot separate the documents of a packed row."""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cpt.cache import open_array
from cpt.data.examples.encoder import CONTEXT, LEARNED, ROW, UNWANTED
from cpt.data.readers.columns import ONE_A_ROW
from cpt.data.store.token_files import Int64, StoredDocuments
from cpt.hf_internals import IGNORED

FORMAT = 3  # version of the stored packing; incremented when the packing of documents changes


@dataclass(frozen=True)
class Packing:
    first_piece: Int64  # row r has the pieces first_piece[r] to first_piece[r + 1]
    starts: Int64  # the first token of each piece in the source
    lengths: Int64  # tokens of each piece
    by_length: NDArray[np.integer]  # numbers of the pieces, sorted by length
    rank: NDArray[np.integer]  # the place of each piece in `by_length`
    first_of_length: Int64  # the first piece of each length in `by_length`

    @property
    def num_rows(self) -> int:
        return len(self.first_piece) - 1

    def pieces(self, row: int, epoch: int) -> tuple[Int64, Int64]:
        """The start of each piece of a row among the source's tokens, and its length. In epoch 0 these are the pieces
        that were packed together. In later epochs the pieces of equal length swap places, by a map i -> a * i + b
        modulo their number that differs for each length. Rows stay as full, each piece is in one row per epoch, and
        only the requested row is computed."""
        first, after = self.first_piece[row : row + 2]
        lengths = self.lengths[first:after]
        if not epoch:
            return self.starts[first:after], lengths
        ranks = self.rank[first:after].tolist()
        begins = self.first_of_length[lengths].tolist()
        ends = self.first_of_length[lengths + 1].tolist()
        swapped_ranks = []
        for rank, begin, end, length in zip(ranks, begins, ends, lengths.tolist(), strict=True):
            count = end - begin  # pieces of this length
            factor, offset = exchange(count, length, epoch)
            swapped_ranks.append(begin + (factor * (rank - begin) + offset) % count)
        return self.starts[self.by_length[swapped_ranks]], lengths


def pack(
    starts: Int64,
    lengths: Int64,
    sequence_length: int,
    packing: str,
    seed: int,
    stride: int | None = None,
) -> Packing:
    """Pack documents into rows; the seed decides which of equally long documents share a row.

    Args:
        starts, lengths: of the documents, among the source's tokens.
        stride: tokens from one piece of a long document to the next; default: a whole row.
    """
    order = np.random.default_rng(seed).permutation(len(starts))
    cut_documents, fill_rows = PACKINGS[packing]
    piece_starts, piece_lengths = cut_documents(
        starts[order], lengths[order], sequence_length, stride or sequence_length
    )
    row_of = fill_rows(piece_lengths, sequence_length)
    by_row = np.argsort(row_of, kind="stable")
    piece_lengths = piece_lengths[by_row]
    smallest_type = np.min_scalar_type(len(piece_lengths))
    by_length = np.argsort(piece_lengths, kind="stable").astype(smallest_type)
    rank = np.empty(len(by_length), smallest_type)
    rank[by_length] = np.arange(len(by_length))
    return Packing(
        first_piece=np.concatenate([np.zeros(1, np.int64), np.bincount(row_of).cumsum()]),
        starts=piece_starts[by_row],
        lengths=piece_lengths,
        by_length=by_length,
        rank=rank,
        first_of_length=np.searchsorted(piece_lengths[by_length], np.arange(sequence_length + 2)),
    )


@lru_cache(maxsize=2**14)
def exchange(count: int, length: int, epoch: int) -> tuple[int, int]:
    """Factor and offset of the map by which `count` pieces of equal length swap places."""
    draws = (
        xxh3_64_intdigest(f"{epoch} {length} {number}".encode()) % count
        for number in itertools.count()
    )
    factor = next(draw for draw in draws if gcd(draw, count) == 1)  # coprime: one-to-one
    return factor, next(draws)


def cut(starts: Int64, lengths: Int64, sequence_length: int, stride: int) -> tuple[Int64, Int64]:
    """Cut documents into pieces of at most `sequence_length` tokens, one every `stride` tokens, the rest last."""
    pieces = 1 + -(-np.maximum(0, lengths - sequence_length) // stride)
    pieces_before = np.repeat(pieces.cumsum() - pieces, pieces)
    number = np.arange(pieces.sum()) - pieces_before  # 0, 1, 2 ... within each document
    piece_starts = np.repeat(starts, pieces) + number * stride
    tokens_to_end = np.repeat(starts + lengths, pieces) - piece_starts
    return piece_starts, np.minimum(sequence_length, tokens_to_end)


def cut_stream(
    starts: Int64, lengths: Int64, sequence_length: int, stride: int
) -> tuple[Int64, Int64]:
    """Cut documents laid end to end: at the end of each document and of each row."""
    begins = lengths.cumsum() - lengths
    rows = np.arange(0, lengths.sum(), sequence_length)
    bounds = np.unique(np.concatenate([begins, rows, lengths.sum(keepdims=True)]))
    document = np.searchsorted(begins, bounds[:-1], side="right") - 1
    return starts[document] + bounds[:-1] - begins[document], np.diff(bounds)


def best_fit(lengths: Int64, sequence_length: int) -> Int64:
    """The row of each piece: the fullest one that it fits. Pieces of equal length are placed together."""
    order = np.argsort(-lengths, kind="stable")
    open_rows = OpenRows(sequence_length)
    row_of_ordered: list[int] = []
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            free = open_rows.least_free(size)
            if free is None:
                free = sequence_length
                open_rows.add_empty(-(-count // (free // size)))
            per_row = free // size  # after one piece a row is the fullest, so it takes all it can
            full_rows = open_rows.take(free, -(-count // per_row))
            last_row = full_rows.pop()  # it may get fewer
            for row in full_rows:
                row_of_ordered.extend([row] * per_row)
            count -= per_row * len(full_rows)
            in_last_row = min(count, per_row)
            row_of_ordered.extend([last_row] * in_last_row)
            count -= in_last_row
            open_rows.put(free - per_row * size, full_rows)
            open_rows.put(free - in_last_row * size, [last_row])
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = row_of_ordered
    return row_of


class OpenRows:
    """Rows that are not full, by their free tokens. Bit r of `free_sizes` is set if a row has r tokens free, so the
    least space that fits a piece is the lowest bit from the piece's length up."""

    def __init__(self, sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self.rows_with_free = defaultdict[int, list[int]](list)
        self.free_sizes = 0
        self.num_rows = 0

    def least_free(self, size: int) -> int | None:
        """The free tokens of the fullest rows that a piece of this size fits; None if it fits no row."""
        fitting = self.free_sizes >> size
        if not fitting:
            return None
        lowest_bit = fitting & -fitting
        return size + lowest_bit.bit_length() - 1

    def add_empty(self, count: int) -> None:
        rows = list(range(self.num_rows, self.num_rows + count))
        self.num_rows += count
        self.put(self.sequence_length, rows)

    def take(self, free: int, count: int) -> list[int]:
        """Remove up to `count` rows with this many free tokens, the last one first."""
        rows = self.rows_with_free[free]
        taken = rows[: -count - 1 : -1]
        del rows[-count:]
        if not rows:
            self.free_sizes &= ~(1 << free)
        return taken

    def put(self, free: int, rows: list[int]) -> None:
        if free and rows:
            self.rows_with_free[free].extend(rows)
            self.free_sizes |= 1 << free


def alike(lengths: Int64, sequence_length: int) -> Int64:
    """Pieces in descending length; a row takes as many as fit if all are as long as its first."""
    order = np.argsort(-lengths, kind="stable")
    descending = lengths[order].tolist()
    first_pieces = [0]  # of each row
    while first_pieces[-1] < len(descending):
        longest = descending[first_pieces[-1]]
        first_pieces.append(first_pieces[-1] + sequence_length // longest)
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = np.searchsorted(first_pieces, np.arange(len(lengths)), side="right") - 1
    return row_of


def end_to_end(lengths: Int64, sequence_length: int) -> Int64:
    row_of: Int64 = (lengths.cumsum() - lengths) // sequence_length
    return row_of


def one_a_row(lengths: Int64, sequence_length: int) -> Int64:
    return np.arange(len(lengths))


Cut = Callable[[Int64, Int64, int, int], tuple[Int64, Int64]]
PACKINGS: dict[str, tuple[Cut, Callable[[Int64, int], Int64]]] = {
    "best_fit": (cut, best_fit),
    "concatenate": (cut_stream, end_to_end),
    "sliding_window": (cut, best_fit),
    "none": (cut, one_a_row),
    "token_budget": (cut, alike),
}


Row = dict[str, torch.Tensor]
NAMES = ("input_ids", "labels", "position_ids")


class PackedRows(Sequence[Row]):
    """Row r of a source, by number.

    A row is {"input_ids", "labels", "position_ids"}, int64 of `sequence_length`. Positions restart with each document,
    from which transformers separates documents. A document's first token has no label, because the token before it
    belongs to another document. Padding comes last, as a separate document without labels.
    """

    def __init__(self, documents: StoredDocuments, packing_folder: Path, layout: "Layout") -> None:
        self.documents = documents
        self.packing_folder = packing_folder
        self.layout = layout
        self.sequence_length = layout.sequence_length
        self.pad = layout.pad
        names = [field.name for field in fields(Packing)]
        self.packing = Packing(
            **{name: open_array(packing_folder / f"{name}.npy") for name in names}
        )
        self._counting = np.arange(self.sequence_length)

    def __reduce__(self) -> tuple[type["PackedRows"], tuple[StoredDocuments, Path, "Layout"]]:
        return type(self), (self.documents, self.packing_folder, self.layout)

    def __len__(self) -> int:
        return self.packing.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens without padding; more than in the documents if windows overlap."""
        return int(self.packing.lengths.sum())

    def __getitem__(self, number: int) -> Row:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self.row(number, epoch=0)

    def row(self, number: int, epoch: int) -> Row:
        arrays = np.empty((3, self.sequence_length), np.int64)
        self.fill(number, epoch, *arrays)
        return dict(zip(NAMES, torch.from_numpy(arrays), strict=True))

    def fill(
        self, number: int, epoch: int, input_ids: Int64, labels: Int64, position_ids: Int64
    ) -> None:
        """Write a row into arrays of `sequence_length`, which may be views of a batch."""
        starts, lengths = self.packing.pieces(number, epoch)
        pieces = list(zip(starts.tolist(), lengths.tolist(), strict=True))
        counting = self._counting
        begins = []
        end = 0
        for start, length in pieces:
            begin = end
            begins.append(begin)
            end += length
            input_ids[begin:end] = self.documents.tokens(start, length)
            position_ids[begin:end] = counting[:length]
        if end < self.sequence_length:
            input_ids[end:] = self.pad
            position_ids[end:] = counting[: self.sequence_length - end]
        labels[:end] = input_ids[:end]
        labels[end:] = IGNORED
        if self.documents.are_examples:
            segments = [self.documents.segments(start, length) for start, length in pieces]
            labels[:end][np.concatenate(segments) == CONTEXT] = IGNORED
        for begin in begins:
            labels[begin] = IGNORED


class PaddedRows(PackedRows):
    """Rows of `packing: token_budget`: each row is a batch with one document per sequence. Rows also have an
    "attention_mask"; their arrays are int64 of [documents, longest], at most `sequence_length` in total."""

    def row(self, number: int, epoch: int) -> Row:
        starts, lengths = self.packing.pieces(number, epoch)
        position_ids = np.tile(np.arange(lengths.max()), (len(lengths), 1))  # (documents, longest)
        attention_mask = (position_ids < lengths[:, None]).astype(np.int64)
        input_ids = np.full(position_ids.shape, self.pad, np.int64)
        is_context = np.zeros(position_ids.shape, bool)
        for line, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            input_ids[line, :length] = self.documents.tokens(start, length)
            if self.documents.are_examples:
                is_context[line, :length] = self.documents.segments(start, length) == CONTEXT
        has_no_label = (position_ids == 0) | (attention_mask == 0) | is_context
        return {
            "input_ids": torch.from_numpy(input_ids),
            "labels": torch.from_numpy(np.where(has_no_label, IGNORED, input_ids)),
            "position_ids": torch.from_numpy(position_ids),
            "attention_mask": torch.from_numpy(attention_mask),
        }


def stack_rows(rows: Sequence[Row]) -> Row:
    """Stack rows [T] to [B, T]; a row of `packing: token_budget` already is a batch."""
    if rows[0]["input_ids"].dim() == 2:
        (row,) = rows
        return row
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class ExampleRows(PackedRows):
    """Rows with one example each, as a trainer expects them. preference: {"prompt_ids", "chosen_ids", "rejected_ids"},
    lists of ids. unpaired: {"prompt_ids", "completion_ids", "label"}. Both are truncated to `sequence_length`
    ids. prompt: the columns of the file's row."""

    def row(self, number: int, epoch: int) -> dict[str, Any]:  # type: ignore[override]
        starts, lengths = self.packing.pieces(number, epoch)
        start = int(starts[0])
        length = int(lengths[0])
        ids = self.documents.tokens(start, length)
        segments = self.documents.segments(start, length)
        if self.layout.form == "prompt":
            row: dict[str, Any] = json.loads(ids[segments == ROW].astype(np.uint8).tobytes())
            return row
        prompt = ids[segments == CONTEXT].tolist()
        tokens_left = self.sequence_length - len(prompt)
        learned = ids[segments == LEARNED][:tokens_left].tolist()
        rejected = ids[segments == UNWANTED][:tokens_left].tolist()
        if self.layout.form == "preference":
            return {"prompt_ids": prompt, "chosen_ids": learned, "rejected_ids": rejected}
        return {
            "prompt_ids": prompt,
            "completion_ids": learned or rejected,
            "label": bool(learned),
        }


@dataclass(frozen=True)
class Layout:
    sequence_length: int
    packing: str
    stride: int | None
    pad: int
    form: str = "document"

    @property
    def is_one_a_row(self) -> bool:
        """Whether each example is one row, which a trainer converts to tensors."""
        return self.form in ONE_A_ROW

    def content(self) -> dict[str, Any]:
        content = asdict(self)
        if self.form == "document":
            del content["form"]  # layouts of documents had none when their names were defined
        return content

    def packer(self, starts: Int64, lengths: Int64, seed: int) -> Callable[[Path], None]:
        """A function that writes the packing into an empty folder; an example in a separate row is never cut."""

        def fill(folder: Path) -> None:
            if self.is_one_a_row:
                packing = pack(starts, lengths, int(lengths.max()), "none", seed)
            else:
                packing = pack(
                    starts, lengths, self.sequence_length, self.packing, seed, self.stride
                )
            for name, array in vars(packing).items():
                np.save(folder / f"{name}.npy", array)

        return fill

    def num_positions(self, packing: Packing) -> int:
        """Positions of all rows, with padding; examples that are rows are padded only when a trainer batches them."""
        if self.is_one_a_row:
            return int(packing.lengths.sum())
        if self.packing == "token_budget":  # each row is padded to its longest document
            longest = np.maximum.reduceat(packing.lengths, packing.first_piece[:-1])
            return int((np.diff(packing.first_piece) * longest).sum())
        return packing.num_rows * self.sequence_length

    def open(self, documents: StoredDocuments, folder: Path) -> PackedRows:
        if self.is_one_a_row:
            return ExampleRows(documents, folder, self)
        if self.packing == "token_budget":
            return PaddedRows(documents, folder, self)
        return PackedRows(documents, folder, self)
