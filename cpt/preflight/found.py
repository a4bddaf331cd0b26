"""What the reality gate found."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cpt.errors import CptError


@dataclass
class PreflightReport:
    """What the gate found; a mistake's class says what its remedy is."""

    mistakes: list[CptError] = field(default_factory=list)
    excused: list[CptError] = field(default_factory=list)
    """Mistakes if the run were started here and now: what an earlier run is still to make, packages of the machine with the GPU."""
    unchecked: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    """What works and is outside the bands that are published, with the source."""
    plan: dict[str, Any] | None = None
    """What the run takes of the GPUs that are here, by plan; None without one."""

    def run(self, check: Callable[[], Any]) -> Any:
        """The check's result, or None with its complaint noted."""
        try:
            return check()
        except CptError as problem:
            self.mistakes.append(problem)
            return None
