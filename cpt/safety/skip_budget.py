"""How many steps a run may skip before it goes back to a checkpoint, and how often it does: counted on the host, alike
on all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpt.data.mixture import RowsOfSteps, Stretch
from cpt.safety.loss_guard import Judged


@dataclass(frozen=True)
class Skipped:
    """A step whose update was left out."""

    step: int
    rows: Stretch


@dataclass
class SkipBudget:
    """More than `skips` skipped steps within `window` exhaust it; then the run goes back before the first of them.

    Args:
        rows: which rows a step reads.
    """

    rows: RowsOfSteps
    window: int
    skips: int
    recent: list[Skipped] = field(default_factory=list)
    total: int = 0
    """Skipped steps of the whole run, those before a roll-back included."""
    rollbacks: int = 0

    def note(self, judged: Judged) -> Skipped | None:
        """A step's verdict; what was skipped, if it was."""
        if not judged.is_skipped:
            return None
        skipped = Skipped(judged.step, self.rows.of(judged.step - 1))
        self.recent = [other for other in self.recent if other.step > judged.step - self.window] + [skipped]
        self.total += 1
        return skipped

    @property
    def is_exhausted(self) -> bool:
        """Too many were skipped: their data or the weights are no good."""
        return len(self.recent) > self.skips

    def roll_back(self) -> list[Skipped]:
        """Count a roll-back; the rows of the steps that led to it are left out from now on."""
        bad, self.recent = self.recent, []
        self.rollbacks += 1
        self.rows.leave_out(skipped.rows for skipped in bad)
        return bad

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        recent = [[skipped.step, *skipped.rows] for skipped in self.recent]
        return {"recent": recent, "total": self.total, "rollbacks": self.rollbacks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state."""
        self.recent = [Skipped(step, (first, end)) for step, first, end in state["recent"]]
        self.total, self.rollbacks = state["total"], state["rollbacks"]
