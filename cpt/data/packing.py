"""Pack documents into rows of exactly `sequence_length` tokens: the fullest row that still has room takes the next document.

Longest documents first (best fit decreasing, arxiv.org/abs/2404.10830). Documents longer than a row are cut into full rows and a rest,
which is packed like a document. No token is lost; padding stands only where nothing fits. One window: all documents of a source at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from cpt.data.store import key_of, open_array, publish_once

FORMAT = 1  # of the stored packing; counts up when the same documents are packed another way
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

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.first_piece) - 1

    def digest(self) -> str:
        """Changes when any row does."""
        digest = xxh3_128()
        for field in fields(self):
            digest.update(np.ascontiguousarray(getattr(self, field.name)).tobytes())
        return digest.hexdigest()


def pack(starts: Int64, lengths: Int64, sequence_length: int, packing: str, seed: int) -> Packing:
    """Lay documents out in rows.

    Args:
        starts, lengths: of the documents, among the source's tokens.
        packing: a name of PACKINGS.
        seed: decides which of equally long documents come together.
    """
    order = np.random.default_rng(seed).permutation(len(starts))
    piece_starts, piece_lengths = cut(starts[order], lengths[order], sequence_length)
    rows = PACKINGS[packing](piece_lengths, sequence_length)
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    first_piece = np.concatenate([np.zeros(1, np.int64), counts.cumsum()])
    return Packing(first_piece, piece_starts[by_row], piece_lengths[by_row])


def cut(starts: Int64, lengths: Int64, sequence_length: int) -> tuple[Int64, Int64]:
    """Pieces of at most `sequence_length` tokens: full ones, then the rest."""
    pieces = -(-lengths // sequence_length)
    number = np.arange(pieces.sum()) - np.repeat(pieces.cumsum() - pieces, pieces)  # 0, 1, 2 ... within each document
    piece_starts = np.repeat(starts, pieces) + number * sequence_length
    return piece_starts, np.minimum(sequence_length, np.repeat(starts + lengths, pieces) - piece_starts)


def best_fit(lengths: Int64, sequence_length: int) -> Int64:
    """The row of each piece.

    Rows are grouped by the room they have left; `roomy` has bit r set while some row has room r, so the fullest row that takes a piece is
    the lowest bit from the piece's length up. Pieces of one length are placed together.
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


def one_per_row(lengths: Int64, sequence_length: int) -> Int64:
    """Each piece has a row of its own."""
    return np.arange(len(lengths))


PACKINGS: dict[str, Callable[[Int64, int], Int64]] = {"best_fit": best_fit, "none": one_per_row}


def pack_once(store_digest: str, starts: Int64, lengths: Int64, sequence_length: int, packing: str, seed: int, cache_dir: Path) -> Path:
    """The folder of the packing, made now or found in `cache_dir`."""
    chosen = xxh3_128(np.ascontiguousarray(starts).tobytes()).hexdigest()
    content = {"format": FORMAT, "store": store_digest, "chosen": chosen, "length": sequence_length, "packing": packing, "seed": seed}

    def fill(folder: Path) -> None:
        packed = pack(starts, lengths, sequence_length, packing, seed)
        for field in fields(packed):
            np.save(folder / f"{field.name}.npy", getattr(packed, field.name))

    return publish_once(cache_dir / "rows" / key_of(content), fill)


def open_packing(folder: Path) -> Packing:
    """A stored packing, memory-mapped."""
    return Packing(*(open_array(folder / f"{field.name}.npy") for field in fields(Packing)))
