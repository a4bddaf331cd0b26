"""The order of training: which row of which source is global row i, a function of (sources, weights, seed, i) and of
nothing else."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from cpt.data.mixture.lengths import cut_documents, length_at
from cpt.data.rows import NAMES, PackedRows, PaddedRows, Row, stack_rows

ENDLESS = 10**12  # rows that can be asked for; sources begin anew, in another order, when they are used up
SHARE_UNIT = 2**32  # weights are kept as whole numbers of this size, so that counting rows is exact


class SourceRows(Protocol):
    """What the mixture needs of a source: endless turns, each of which is a row."""

    def place(self, turn: int, seed: str) -> tuple[int, int]:
        """How often the source was gone through before turn `turn`, and the row whose turn it is, in an order drawn
        from the seed."""
        ...

    def row_at(self, turn: int, seed: str) -> tuple[PackedRows, int, int]:
        """The rows among which that row is, its number there, and the same time through."""
        ...


class Turns:
    """Whose turn each global row is: arithmetic, exact, and as fast at row 10**11 as at row 0.

    Weights may change at given rows. Between two changes each source has its share to within two rows; what it is owed
    is made up for after the next change, and turns are counted on, so that a source goes on where it was left.

    Args:
        changes: (row, weights of the sources from this row on), in the order of rows, the first from row 0 on. A
            weight may be 0.
    """

    def __init__(self, changes: Sequence[tuple[int, Sequence[float]]]) -> None:
        self.first_rows = [first for first, _ in changes]
        self.proportions: list[list[int]] = []
        self.before = [[0] * len(changes[0][1])]
        owed: dict[int, float] = {}
        for (first, weights), (end, _) in pairwise(changes):
            quotas, owed = whole_quotas(end - first, weights, owed)
            self.proportions.append(quotas)  # shared out by these, each source has exactly its quota at the end
            self.before.append([had + new for had, new in zip(self.before[-1], quotas, strict=True)])
        self.proportions.append(in_units(changes[-1][1]))

    def turn(self, number: int) -> tuple[int, int]:
        """The source that row `number` comes from, and how many turns it had before."""
        part = bisect_right(self.first_rows, number) - 1
        source, turn = share_out(number - self.first_rows[part], self.proportions[part])
        return source, self.before[part][source] + turn

    def shares(self, number: int) -> list[float]:
        """Each source's share of the rows from `number` on, until weights change."""
        proportions = self.proportions[bisect_right(self.first_rows, number) - 1]
        return [proportion / sum(proportions) for proportion in proportions]

    def counts(self, number: int) -> list[int]:
        """How many of the first `number` rows come from each source."""
        part = bisect_right(self.first_rows, number) - 1
        taken = turns_taken(number - self.first_rows[part], self.proportions[part])
        return [had + new for had, new in zip(self.before[part], taken, strict=True)]


class MixtureRows(Dataset[Row]):
    """Endless rows of a weighted mixture, by global number.

    Each source is gone through completely, in an order drawn from the seed, before it begins anew in another order,
    also where the weights change in between. Among the first n rows each source has its share of n, to within one row
    per source.

    Args:
        weights: of rows.
        changes: (row, weights from this row on), in the order of rows.
        lengths: (row, tokens that are read at once from this row on), likewise; see `cpt.data.mixture.lengths`.
    """

    def __init__(
        self,
        sources: Sequence[SourceRows],
        weights: Sequence[float],
        seed: int,
        changes: Sequence[tuple[int, Sequence[float]]] = (),
        lengths: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.sources, self.seed, self.lengths = list(sources), seed, list(lengths)
        self.turns = Turns([(0, weights), *changes])

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Row:
        source, turn = self.turn(number)
        rows, row, epoch = self.sources[source].row_at(turn, f"{self.seed} {source}")
        found = rows.row(row, epoch)
        if self.lengths:
            self.cut(number, found["position_ids"].numpy(), found["labels"].numpy())
        return found

    def cut(self, number: int, position_ids: NDArray[np.int64], labels: NDArray[np.int64]) -> None:
        """To the length that holds at row `number`, in place."""
        if (length := length_at(number, self.lengths)) is not None:
            cut_documents(position_ids, labels, length)

    def batch(self, numbers: Sequence[int]) -> Row:
        """Rows as one batch, [B, T]: what `stack_rows` makes of them, written at once."""
        found = []
        for number in numbers:
            source, turn = self.turn(number)
            found.append(self.sources[source].row_at(turn, f"{self.seed} {source}"))
        if any(isinstance(rows, PaddedRows) for rows, _, _ in found):
            return stack_rows([rows.row(row, epoch) for rows, row, epoch in found])
        arrays = np.empty((len(NAMES), len(found), found[0][0].sequence_length), np.int64)
        for line, (rows, row, epoch) in enumerate(found):
            rows.fill(row, epoch, *arrays[:, line])
            self.cut(numbers[line], arrays[2, line], arrays[1, line])
        return dict(zip(NAMES, torch.from_numpy(arrays), strict=True))

    def documents_in(self, number: int) -> NDArray[np.int64]:
        """Tokens of each document of a global row; none of them is read."""
        source, turn = self.turn(number)
        rows, row, epoch = self.sources[source].row_at(turn, f"{self.seed} {source}")
        return rows.packing.pieces(row, epoch)[1]

    def turn(self, number: int) -> tuple[int, int]:
        """The source whose turn a global row is, and how many it had before."""
        if not 0 <= number < ENDLESS:
            raise IndexError(f"row {number}: rows go from 0 to {ENDLESS - 1}")
        return self.turns.turn(int(number))

    def source_of(self, number: int) -> int:
        """Which source, counted as in the recipe, global row `number` comes from."""
        return self.locate(number)[0]

    def locate(self, number: int) -> tuple[int, int]:
        """The source of a global row and the row's number there."""
        source, _, row = self.place(number)
        return source, row

    def place(self, number: int) -> tuple[int, int, int]:
        """The source of a global row, how often the source was gone through before, and the row's number there."""
        source, turn = self.turn(number)
        epoch, row = self.sources[source].place(turn, f"{self.seed} {source}")
        return source, epoch, row


def in_units(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers; only 0 becomes 0."""
    total = sum(weights)
    return [max(1, round(weight / total * SHARE_UNIT)) if weight > 0 else 0 for weight in weights]


def whole_quotas(rows: int, weights: Sequence[float], owed: Mapping[int, float]) -> tuple[list[int], dict[int, float]]:
    """Rows of each source among `rows`, and what each is owed after them.

    Args:
        owed: rows that a source had too few before, below 0 too many; forgotten when other sources than these have a
            weight.
    """
    total = sum(weights)
    active = [source for source, weight in enumerate(weights) if weight > 0]
    before = owed if owed.keys() == set(active) else dict.fromkeys(active, 0.0)
    owed = {source: before[source] + rows * weights[source] / total for source in active}
    quotas = [0] * len(weights)
    for source in active:
        quotas[source] = max(0, math.floor(owed[source]))
    while (left := rows - sum(quotas)) != 0:  # at most one row a source
        step = 1 if left > 0 else -1
        source = max((s for s in active if quotas[s] + step >= 0), key=lambda s: step * (owed[s] - quotas[s]))
        quotas[source] += step
    return quotas, {source: owed[source] - quotas[source] for source in active}


def share_out(number: int, proportions: Sequence[int]) -> tuple[int, int]:
    """The source whose turn it is, and how many turns it had before.

    Of the first n rows, the first source takes ceil(n * p / total) and leaves the others to be shared out in the same
    way. This is what grain's MapDataset.mix does, but for its rounding of weights to 1/100 of the smallest one, which
    turns 1.009 : 1 into 1 : 1.
    """
    before, upto, total = number, number + 1, sum(proportions)
    for source, proportion in enumerate(proportions):
        left_before, left_upto = (n * (total - proportion) // total for n in (before, upto))
        if before - left_before != upto - left_upto:
            return source, before - left_before
        before, upto, total = left_before, left_upto, total - proportion
    raise AssertionError("the last source takes what is left")


def turns_taken(number: int, proportions: Sequence[int]) -> list[int]:
    """How many of the first `number` rows each source takes in `share_out`."""
    taken, left, total = [], number, sum(proportions)
    for proportion in proportions:
        remaining = left * (total - proportion) // total if total else 0
        taken.append(left - remaining)
        left, total = remaining, total - proportion
    return taken
