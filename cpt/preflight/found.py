"""What the reality gate found, and the exit code of `cpt check` that follows from it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cpt.errors import CptError, ResourceError

MISTAKES = 2
NOT_READY = 3  # a blocker on this machine, or something that decides was not checked


@dataclass
class PreflightReport:
    """What the gate found; a mistake's class says what its remedy is."""

    mistakes: list[CptError] = field(default_factory=list)
    """What is wrong in the recipe or in the files that it names, on any machine."""
    blockers: list[CptError] = field(default_factory=list)
    """What would stop the run on this machine: a missing package or compiler, too little disk, a run that has to
    finish first."""
    unchecked: list[str] = field(default_factory=list)
    """What decides whether the run works and could not be looked at from here."""
    warnings: list[str] = field(default_factory=list)
    """What works and is outside the bands that are published, with the source."""
    plan: dict[str, Any] | None = None
    """What the run takes of the GPUs that are here, by plan; None without one."""

    @property
    def exit_code(self) -> int:
        """0 only where everything that decides was checked and is fine."""
        return MISTAKES if self.mistakes else NOT_READY if self.blockers or self.unchecked else 0

    def add(self, problem: CptError) -> None:
        """Note a mistake, or a blocker where the machine lacks something."""
        (self.blockers if isinstance(problem, ResourceError) else self.mistakes).append(problem)

    def run(self, check: Callable[[], Any]) -> Any:
        """The check's result, or None with its complaint noted."""
        try:
            return check()
        except CptError as problem:
            self.add(problem)
            return None
