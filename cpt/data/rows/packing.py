"""Pack documents into rows of exactly `sequence_length` tokens, so that no token is lost.

best_fit: the fullest row that still has room takes the next document, longest documents first
(arxiv.org/abs/2404.10830). Documents longer than a row are cut into full rows and a rest, which is packed like a
document. Padding stands only where nothing fits.
concatenate: all documents one after the other, cut wherever a row is full; only the last row is padded, but most rows
begin with the rest of a document whose beginning they do not see.
sliding_window: windows of a row's length, one each `stride` tokens of a document, so that each token is read with
something before it; tokens in several windows are learnt from several times. The windows are packed by best fit,
because a document's last one may be short.
none: each document, or piece of one, has a row of its own.
token_budget: documents of similar length, as many as fit into a row's tokens when each is padded to the longest of
them: a batch by itself, for models that cannot tell the documents of a packed row apart.

Whatever the packing, documents that share a row do so anew in each epoch: pieces of one length change places (see
`Packing.pieces`)."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from math import gcd
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from cpt.cache import open_array

FORMAT = 3  # of the stored packing; counts up when the same documents are packed, or change places, another way
Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Packing:
    """Which pieces of documents stand in which row."""

    first_piece: Int64
    """Row r holds the pieces first_piece[r] to first_piece[r + 1]."""
    starts: Int64
    """Where a piece begins among the source's tokens."""
    lengths: Int64
    """How many tokens it has."""
    by_length: NDArray[np.integer]
    """The pieces, by number, sorted by length."""
    rank: NDArray[np.integer]
    """Where each piece stands in `by_length`."""
    first_of_length: Int64
    """Where the pieces of each length begin in `by_length`."""

    @property
    def num_rows(self) -> int:
        return len(self.first_piece) - 1

    def pieces(self, row: int, epoch: int) -> tuple[Int64, Int64]:
        """Where the pieces of a row begin among the source's tokens, and how long they are.

        In epoch 0 they are those that were packed together. In each further epoch the pieces of one length change
        places with each other, for each length by another map i -> a * i + b modulo their number. So rows stay as full
        as they are, each piece stands in one row of each epoch, and nothing is computed but the row asked for. A piece
        of a length of its own has no other place.
        """
        first, after = self.first_piece[row : row + 2]
        lengths = self.lengths[first:after]
        if not epoch:
            return self.starts[first:after], lengths
        begins, ends = self.first_of_length[lengths].tolist(), self.first_of_length[lengths + 1].tolist()
        places = []
        for rank, begin, end, length in zip(
            self.rank[first:after].tolist(), begins, ends, lengths.tolist(), strict=True
        ):
            factor, offset = exchange(end - begin, length, epoch)
            places.append(begin + (factor * (rank - begin) + offset) % (end - begin))
        return self.starts[self.by_length[places]], lengths


def pack(
    starts: Int64, lengths: Int64, sequence_length: int, packing: str, seed: int, stride: int | None = None
) -> Packing:
    """Lay documents out in rows.

    Args:
        starts, lengths: of the documents, among the source's tokens.
        packing: a name of PACKINGS.
        seed: decides which of equally long documents come together.
        stride: tokens from one piece of a long document to the next; by default all of a row, so that no token is read
            twice.
    """
    order = np.random.default_rng(seed).permutation(len(starts))
    pieces_of, rows_of = PACKINGS[packing]
    piece_starts, piece_lengths = pieces_of(starts[order], lengths[order], sequence_length, stride or sequence_length)
    rows = rows_of(piece_lengths, sequence_length)
    by_row = np.argsort(rows, kind="stable")
    first_piece = np.concatenate([np.zeros(1, np.int64), np.bincount(rows).cumsum()])
    piece_starts, piece_lengths = piece_starts[by_row], piece_lengths[by_row]
    small = np.min_scalar_type(len(piece_lengths))
    by_length = np.argsort(piece_lengths, kind="stable").astype(small)
    rank = np.empty(len(by_length), small)
    rank[by_length] = np.arange(len(by_length))
    first_of_length = np.searchsorted(piece_lengths[by_length], np.arange(sequence_length + 2))
    return Packing(first_piece, piece_starts, piece_lengths, by_length, rank, first_of_length)


@lru_cache(maxsize=2**14)
def exchange(count: int, length: int, epoch: int) -> tuple[int, int]:
    """Factor and offset of the map by which the `count` pieces of one length change places; without a common divisor
    it is one to one."""
    draws = (xxh3_64_intdigest(f"{epoch} {length} {number}".encode()) % count for number in itertools.count())
    return next(draw for draw in draws if gcd(draw, count) == 1), next(draws)


def cut(starts: Int64, lengths: Int64, sequence_length: int, stride: int) -> tuple[Int64, Int64]:
    """Pieces of at most `sequence_length` tokens, one each `stride` tokens until a document ends: full ones, then the
    rest."""
    pieces = 1 + -(-np.maximum(0, lengths - sequence_length) // stride)
    number = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)  # 0, 1, 2 ... within each document
    piece_starts = np.repeat(starts, pieces) + number * stride
    return piece_starts, np.minimum(sequence_length, np.repeat(starts + lengths, pieces) - piece_starts)


def cut_stream(starts: Int64, lengths: Int64, sequence_length: int, stride: int) -> tuple[Int64, Int64]:
    """Pieces of the documents laid end to end: a cut where a document ends, and where a row does."""
    begins = lengths.cumsum() - lengths
    bounds = np.unique(
        np.concatenate([begins, np.arange(0, lengths.sum(), sequence_length), lengths.sum(keepdims=True)])
    )
    document = np.searchsorted(begins, bounds[:-1], side="right") - 1
    return starts[document] + bounds[:-1] - begins[document], np.diff(bounds)


def best_fit(lengths: Int64, sequence_length: int) -> Int64:
    """The row of each piece.

    Rows are grouped by the room they have left; `roomy` has bit r set while some row has room r, so the fullest row
    that takes a piece is the lowest bit from the piece's length up. Pieces of one length are placed together.
    """
    order = np.argsort(-lengths, kind="stable")
    rows_with_room: list[list[int]] = [[] for _ in range(sequence_length + 1)]
    roomy, num_rows, placed = 0, 0, []
    sizes, counts = np.unique(lengths, return_counts=True)
    for size, count in zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fitting = roomy >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                rows = rows_with_room[room]
            else:
                room, needed = sequence_length, -(-count // (sequence_length // size))
                rows = list(range(num_rows, num_rows + needed))
                num_rows += needed
            each = room // size  # a row that takes one piece is now the fullest, so it takes as many as it can
            taken = [rows.pop() for _ in range(min(len(rows), -(-count // each)))]
            if not rows:
                roomy &= ~(1 << room)
            last = min(count, each * len(taken)) - each * (len(taken) - 1)  # the last row may take fewer
            for row in taken[:-1]:
                placed.extend([row] * each)
            placed.extend([taken[-1]] * last)
            for left, remaining in ((room - each * size, taken[:-1]), (room - last * size, taken[-1:])):
                if left and remaining:
                    rows_with_room[left].extend(remaining)
                    roomy |= 1 << left
            count -= each * (len(taken) - 1) + last
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = placed
    return row_of


def in_order(lengths: Int64, sequence_length: int) -> Int64:
    return (lengths.cumsum() - lengths) // sequence_length


def one_per_row(lengths: Int64, sequence_length: int) -> Int64:
    return np.arange(len(lengths))


def alike(lengths: Int64, sequence_length: int) -> Int64:
    """Pieces by falling length; a row takes as many as fit when all are as long as its first."""
    order = np.argsort(-lengths, kind="stable")
    falling = lengths[order].tolist()
    begins = [0]
    while begins[-1] < len(falling):
        begins.append(begins[-1] + sequence_length // falling[begins[-1]])
    row_of = np.empty(len(lengths), np.int64)
    row_of[order] = np.searchsorted(begins, np.arange(len(lengths)), side="right") - 1
    return row_of


Cut = Callable[[Int64, Int64, int, int], tuple[Int64, Int64]]
PACKINGS: dict[str, tuple[Cut, Callable[[Int64, int], Int64]]] = {
    "best_fit": (cut, best_fit),
    "concatenate": (cut_stream, in_order),
    "sliding_window": (cut, best_fit),
    "none": (cut, one_per_row),
    "token_budget": (cut, alike),
}


def fill_packing(
    starts: Int64, lengths: Int64, sequence_length: int, packing: str, seed: int, stride: int | None, folder: Path
) -> None:
    packed = pack(starts, lengths, sequence_length, packing, seed, stride)
    for field in fields(packed):
        np.save(folder / f"{field.name}.npy", getattr(packed, field.name))


def open_packing(folder: Path) -> Packing:
    return Packing(*(open_array(folder / f"{field.name}.npy") for field in fields(Packing)))
