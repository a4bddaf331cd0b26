"""Which rows a step reads: the next ones, without the stretches that a run leaves out."""

from collections.abc import Iterable
from dataclasses import dataclass, field

Stretch = tuple[int, int]
"""Global numbers of a first row and of the row after the last."""


@dataclass
class RowsOfSteps:
    """Step s reads `rows_per_step` rows from `first(s)` on; all is arithmetic, so resuming needs the stretches and
    nothing else."""

    rows_per_step: int
    left_out: list[Stretch] = field(default_factory=list)
    """Ascending; each begins where a step would begin."""

    def first(self, step: int) -> int:
        """Global number of the step's first row: also how many rows the run went through before it, those left out
        included."""
        return moved_on(step * self.rows_per_step, self.left_out)

    def of(self, step: int) -> Stretch:
        """The rows of a step."""
        first = self.first(step)
        return first, first + self.rows_per_step

    def leave_out(self, stretches: Iterable[Stretch]) -> None:
        """From now on no step reads them."""
        merged: list[Stretch] = []
        for first, end in sorted({*self.left_out, *stretches}):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((first, end))
        self.left_out = merged


def moved_on(row: int, left_out: Iterable[Stretch]) -> int:
    """The row that is read as the `row`-th when these ascending stretches are left out."""
    for first, end in left_out:
        if row < first:
            break
        row += end - first
    return row
