"""The training order: the source and row of global row i, a function of (sources, weights, seed, i) only."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import itemgetter
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from cpt.data.rows.chunks import ChunkedRows
from cpt.data.rows.packing import NAMES, PackedRows, PaddedRows, Row, stack_rows
from cpt.data.store.token_files import Int64
from cpt.errors import RecipeError
from cpt.hf_internals import IGNORED
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Data

RowRange = tuple[int, int]  # global numbers of the first row and of the row after the last
ENDLESS = 10**12  # number of rows; sources repeat in another order
SHARE_UNIT = 2**32  # weights are integers of this size, so that counting rows is exact


@dataclass
class RowsOfSteps:
    """Step s reads `rows_per_step` rows from `first(s)` on. To resume, only the skipped ranges are needed."""

    rows_per_step: int
    left_out: list[RowRange] = field(default_factory=list)
    """Ascending; each begins at the first row of a step."""

    def first(self, step: int) -> int:
        """The global number of the step's first row, equal to the number of rows before it, skipped ones included."""
        return shift_past_skipped(step * self.rows_per_step, self.left_out)

    def of(self, step: int) -> RowRange:
        first = self.first(step)
        return first, first + self.rows_per_step

    def leave_out(self, ranges: Iterable[RowRange]) -> None:
        merged: list[RowRange] = []
        for first, end in sorted({*self.left_out, *ranges}):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        self.left_out = merged


def shift_past_skipped(row: int, left_out: Iterable[RowRange]) -> int:
    """The row that is read as number `row` when these ascending ranges are skipped."""
    for first, end in left_out:
        if row < first:
            break
        row += end - first
    return row


Value = TypeVar("Value")
Lengths = list[tuple[int, int]]  # (row, context length from this row on), in row order


def lengths_of_phases(data: Data) -> Lengths:
    """The context length from each row on; empty if it is always the whole row."""
    if all(phase.context_length is None for phase in data.phases):
        return []
    lengths = []
    first = 0
    for phase in data.phases:
        lengths.append((first, phase.context_length or data.sequence_length))
        if phase.until is not None:
            first = round(phase.until / data.sequence_length)
    return lengths


def cut_documents(position_ids: Int64, labels: Int64, length: int) -> None:
    """Cut the documents of a row, in place: positions restart in each piece, without a label for its first token."""
    if len(position_ids) > length:
        position_ids %= length
        labels[position_ids == 0] = IGNORED


def from_row(changes: list[tuple[int, Value]], row: int) -> list[tuple[int, Value]]:
    """The changes of a run, counted from a later row: the last one before it holds from 0 on."""
    if row == 0:
        return changes
    number = bisect_right(changes, row, key=itemgetter(0)) - 1
    return [(max(0, first - row), value) for first, value in changes[max(0, number) :]]


Shares = NDArray[np.float64]
Changes = list[tuple[int, Shares]]
"""(row, shares of the sources from this row on), in row order, starting at row 0."""
LINEAR_BLOCKS = 64  # in a linear change; weights are constant in a block, so quotas are exact


def shares_of_phases(data: Data, tokens: Sequence[int]) -> Changes:
    """The shares of tokens that the recipe requests, and the rows where each begins. A phase ends at the nearest row.
    A linear phase is split into blocks, each with the shares at its middle."""
    if not data.phases:
        weights = np.array([source.weight for source in data.sources])
        if data.temperature is not None:
            weights = (np.array(tokens) / max(tokens)) ** (1 / data.temperature)
        return [(0, weights / weights.sum())]
    changes: Changes = []
    first = 0
    shares_before = np.empty(0)
    for number, phase in enumerate(data.phases):
        if phase.until_learning_rate is not None:
            raise RecipeError(
                f"`data.phases[{number}].until_learning_rate` depends on the schedule of a run, which a mixture alone"
                " lacks. Open it as the run does: build_data(phases_in_tokens(recipe), ...)."
            )
        weights = np.array(
            [phase.weights.get(reported_name(source), 0.0) for source in data.sources]
        )
        shares = weights / weights.sum()
        end = first if phase.until is None else round(phase.until / data.sequence_length)
        if phase.change == "linear":
            for block in range(LINEAR_BLOCKS):
                progress = (block + 0.5) / LINEAR_BLOCKS
                first_of_block = first + (end - first) * block // LINEAR_BLOCKS
                shares_of_block = (1 - progress) * shares_before + progress * shares
                changes.append((first_of_block, shares_of_block))
            first = end  # the last phase keeps its final shares
        changes.append((first, shares))
        first = end
        shares_before = shares
    return changes


def shares_over(changes: Changes, rows: int) -> Shares:
    """The average shares of the first rows."""
    rows = max(rows, 1)
    bounds = [min(first, rows) for first, _ in changes]
    rows_of_changes = np.diff([*bounds, rows])
    return np.average([shares for _, shares in changes], axis=0, weights=rows_of_changes)


class Turns:
    """The source of each global row: arithmetic, exact, and as fast at row 10**11 as at row 0.

    Between two changes of the weights each source has its share to within two rows; the difference is made up after
    the next change. Turns are counted across changes, so each source continues at its next row.

    Args:
        changes: (row, weights of the sources from this row on), in row order, starting at row 0.
        rows_read: turns that each source had in earlier stretches of the run.
    """

    def __init__(
        self, changes: Sequence[tuple[int, Sequence[float]]], rows_read: Sequence[int] = ()
    ) -> None:
        self.first_rows = [first for first, _ in changes]
        self.proportions: list[list[int]] = []
        _, last_weights = changes[-1]
        self.before = [list(rows_read) or [0] * len(last_weights)]
        owed: dict[int, float] = {}
        for (first, weights), (end, _) in pairwise(changes):
            quotas, owed = whole_quotas(end - first, weights, owed)
            self.proportions.append(quotas)  # these give each source exactly its quota at the end
            self.before.append(list(map(sum, zip(self.before[-1], quotas, strict=True))))
        self.proportions.append(as_integers(last_weights))

    def turn(self, number: int) -> tuple[int, int]:
        """The source of row `number`, and the number of its turns before this row, since the run began."""
        before = self.counts(number)
        after = self.counts(number + 1)
        source = next(source for source, count in enumerate(after) if count != before[source])
        return source, before[source]

    def shares(self, number: int) -> list[float]:
        """Each source's share of the rows from `number` on, until the weights change."""
        proportions = self.proportions[bisect_right(self.first_rows, number) - 1]
        return [proportion / sum(proportions) for proportion in proportions]

    def counts(self, number: int) -> list[int]:
        """The number of rows of each source before row `number`. Of n rows, the first source takes
        ceil(n * p / total); the others share the rest in the same way, as in grain's MapDataset.mix, which rounds
        weights to 1/100 of the smallest: 1.009 : 1 becomes 1 : 1."""
        part = bisect_right(self.first_rows, number) - 1
        rows = number - self.first_rows[part]
        total = sum(self.proportions[part])
        counts = []
        for before, proportion in zip(self.before[part], self.proportions[part], strict=True):
            rows_of_others = rows * (total - proportion) // total if total else 0
            counts.append(before + rows - rows_of_others)
            rows = rows_of_others
            total -= proportion
        return counts


@dataclass(eq=False)
class MixtureRows(Dataset[Row]):
    """Endless rows of a weighted mixture, by global number.

    Each source is read completely, in an order drawn from the seed, before it repeats in another order, even if the
    weights change in between. Among the first n rows each source has its share of n, to within one row per source.
    """

    sources: Sequence[ChunkedRows]
    turns: Turns  # by rows counted from `first_row`; the turns of a source count from the beginning of the run
    seed: int
    lengths: Sequence[tuple[int, int]] = ()  # by rows counted from `first_row`
    first_row: int = 0  # where this mixture begins in the run; rows before it cannot be read
    numbers: Sequence[int] = ()
    """Each source's number in the order of first use, which decides the order of its rows; by default its index in
    `sources`."""

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> Row:
        rows, index, epoch = self.row_at(number)
        row = rows.row(index, epoch)
        if self.lengths:
            self.cut(number, row["position_ids"].numpy(), row["labels"].numpy())
        return row

    def cut(self, number: int, position_ids: Int64, labels: Int64) -> None:
        """Cut the documents of a row to the context length of its phase, in place."""
        row = self.row_in_mixture(number)
        change = bisect_right(self.lengths, row, key=itemgetter(0)) - 1
        _, length = self.lengths[change]
        cut_documents(position_ids, labels, length)

    def batch(self, numbers: Sequence[int]) -> Row:
        """Rows as one batch [B, T], equal to `stack_rows` but written directly."""
        places = list(map(self.row_at, numbers))
        if any(isinstance(rows, PaddedRows) for rows, _, _ in places):
            return stack_rows([rows.row(index, epoch) for rows, index, epoch in places])
        batch_shape = (len(numbers), places[0][0].sequence_length)  # (B, T)
        arrays = np.empty((len(NAMES), *batch_shape), np.int64)
        input_ids, labels, position_ids = arrays
        for line, (rows, index, epoch) in enumerate(places):
            rows.fill(index, epoch, input_ids[line], labels[line], position_ids[line])
            if self.lengths:
                self.cut(numbers[line], position_ids[line], labels[line])
        return dict(zip(NAMES, torch.from_numpy(arrays), strict=True))

    def documents_in(self, number: int) -> Int64:
        """Tokens of each document of a global row; computed without reading tokens."""
        rows, index, epoch = self.row_at(number)
        _, lengths = rows.packing.pieces(index, epoch)
        return lengths

    def row_in_mixture(self, number: int) -> int:
        """The number of a global row in this mixture."""
        if not self.first_row <= number < ENDLESS:
            raise IndexError(f"row {number}: expected {self.first_row} to {ENDLESS - 1}")
        return int(number) - self.first_row

    def turn(self, number: int) -> tuple[int, int]:
        return self.turns.turn(self.row_in_mixture(number))

    def counts(self, number: int) -> list[int]:
        """The number of rows of each source before a global row, since the run began."""
        if number == 0:
            return [0] * len(self.sources)
        return self.turns.counts(self.row_in_mixture(number))

    def row_at(self, number: int) -> tuple[PackedRows, int, int]:
        """The rows of the source of a global row, the row's number there, and the epoch."""
        source, turn = self.turn(number)
        number = self.numbers[source] if self.numbers else source
        return self.sources[source].row_at(turn, f"{self.seed} {number}")


def whole_quotas(
    rows: int, weights: Sequence[float], owed: Mapping[int, float]
) -> tuple[list[int], dict[int, float]]:
    """Rows of each source among `rows`, and the rows owed to each after them. `owed`: missing rows from before; reset
    when a different set of sources has a weight."""
    total = sum(weights)
    active = [source for source, weight in enumerate(weights) if weight > 0]
    if owed.keys() != set(active):
        owed = dict.fromkeys(active, 0.0)
    owed = {source: owed[source] + rows * weights[source] / total for source in active}
    quotas = [0] * len(weights)
    for source in active:
        quotas[source] = max(0, math.floor(owed[source]))

    def missing(source: int) -> float:
        return owed[source] - quotas[source]

    while sum(quotas) < rows:  # at most one row more per source
        quotas[max(active, key=missing)] += 1
    while sum(quotas) > rows:  # at most one row less
        reducible = [source for source in active if quotas[source]]
        quotas[min(reducible, key=missing)] -= 1
    return quotas, {source: missing(source) for source in active}


def as_integers(weights: Sequence[float]) -> list[int]:
    """Only a weight of 0 becomes 0."""
    total = sum(weights)
    integers = [0] * len(weights)
    for source, weight in enumerate(weights):
        if weight > 0:
            integers[source] = max(1, round(weight / total * SHARE_UNIT))
    return integers
