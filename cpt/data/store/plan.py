"""How a source is cut up, from its files' names and sizes alone: shards that one process tokenises, and windows of
shards that are packed and shuffled together.

A small source is one window. A large one is read window by window, in an order of its shards that is drawn from the
seed, so that training begins when the first, small, window is there, and never needs more than a few of them. Nothing
here depends on what is stored already."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from os.path import commonpath
from pathlib import Path

import numpy as np

from cpt.cache import key_of
from cpt.data.readers.documents import Piece
from cpt.data.readers.sources import pieces_of
from cpt.data.store.order import seed_of
from cpt.recipe.schema import DocumentSource

Shard = list[Piece]
FileState = tuple[str, int, str]  # name, size, version
SHARD_BYTES = 16 * 2**20  # of files: a kill loses little, and opening a file costs nothing beside it
ORDERED_PARTS = 64  # of a source that is read by a score
HELD_OUT_SHARDS = 8  # of a source in windows: its held-out set must be there before the first step


@dataclass(frozen=True)
class Plan:
    """The shards of a source and the windows that they are read in."""

    shards: list[Shard]
    """In the order of the source's documents."""
    num_bytes: list[int]
    """Of each shard's files or parts of files, about; 0 where it is not known."""
    windows: list[list[int]]
    """Shards of each window, by number, in the order of training."""
    held_out: list[int]
    """The shards that a held-out set is taken from; the same for every seed."""
    is_ordered: bool = False
    """Each window is a part of all documents, by their score."""

    @property
    def is_whole(self) -> bool:
        return len(self.windows) == 1

    @property
    def is_streamed(self) -> bool:
        """Whether it may be read while most of it is not there yet."""
        return not self.is_whole and not self.is_ordered

    @cached_property
    def bytes_upto(self) -> list[int]:
        """Bytes of the windows before each window, in the order of training, and of all."""
        return [0, *accumulate(sum(self.num_bytes[shard] for shard in window) for window in self.windows)]

    @cached_property
    def fingerprint(self) -> str:
        """Of the files' names below their common folder, and of how they are cut; moving them changes nothing."""
        paths = {piece.path for shard in self.shards for piece in shard}
        root = commonpath(paths) if len(paths) > 1 else str(Path(next(iter(paths))).parent)
        cuts = [[[piece.path.removeprefix(root), piece.start, piece.stop] for piece in shard] for shard in self.shards]
        return key_of({"shards": cuts, "bytes": self.num_bytes, "windows": self.windows, "ordered": self.is_ordered})


def plan_of(
    source: DocumentSource,
    key: str,
    states: Sequence[FileState],
    *,
    window_bytes: int | None,
    seed: int,
    ordered: bool = False,
) -> Plan:
    """Cut a source up.

    Args:
        states: of its files; none for what has no size and comes one row after the other, which is one shard.
        window_bytes: of files, from which on there are several windows; None for a single one.
        seed: decides the order of the windows.
        ordered: whether documents have a score that they are read by, for which all must be there.
    """
    shard_bytes = SHARD_BYTES if window_bytes is None else min(SHARD_BYTES, window_bytes)
    pieces = pieces_of(source, key, shard_bytes)
    size_of = {name: size for name, size, _ in states}
    sizes = [bytes_of(piece, size_of) for piece in pieces]
    if not states or source.max_documents is not None:  # documents are counted from the first on
        shards, num_bytes = [pieces], [sum(sizes)]
    else:
        shards, num_bytes = grouped(pieces, sizes, shard_bytes)
    everything = list(range(len(shards)))
    if ordered:
        return Plan(shards, num_bytes, [everything] * ORDERED_PARTS, everything, is_ordered=True)
    if window_bytes is None or sum(num_bytes) <= window_bytes:
        return Plan(shards, num_bytes, [everything], everything)
    order = np.random.default_rng(seed_of(seed, "windows")).permutation(len(shards)).tolist()
    held_out = sorted(np.random.default_rng(0).permutation(len(shards))[:HELD_OUT_SHARDS].tolist())
    return Plan(shards, num_bytes, in_windows(order, num_bytes, shard_bytes, window_bytes), held_out)


def grouped(pieces: Sequence[Piece], sizes: Sequence[int], shard_bytes: int) -> tuple[list[Shard], list[int]]:
    """Small files share a shard; with the size of each."""
    shards: list[Shard] = []
    num_bytes: list[int] = []
    for piece, size in zip(pieces, sizes, strict=True):
        if not shards or num_bytes[-1] + size > shard_bytes:
            shards.append([])
            num_bytes.append(0)
        shards[-1].append(piece)
        num_bytes[-1] += size
    return shards, num_bytes


def in_windows(order: Sequence[int], num_bytes: Sequence[int], first_bytes: int, window_bytes: int) -> list[list[int]]:
    """Shards in the given order, grouped into windows: the first two of one shard, then twice as much each time, up to
    the full size."""
    windows: list[list[int]] = [[]]
    room = wanted = first_bytes
    for shard in order:
        if windows[-1] and room < num_bytes[shard]:
            if len(windows) > 1:
                wanted = min(2 * wanted, window_bytes)
            windows.append([])
            room = wanted
        windows[-1].append(shard)
        room -= num_bytes[shard]
    return windows


def bytes_of(piece: Piece, size_of: dict[str, int]) -> int:
    """Of a piece; 0 where the size is not known."""
    size = size_of.get(piece.path) or size_of.get(str(Path(piece.path).absolute())) or 0
    return max(0, (size if piece.stop is None else piece.stop) - piece.start)
