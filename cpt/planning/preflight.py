"""The report of the reality gate: mistakes with their line in the recipe, blockers, warnings, and the exit code."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cpt.errors import CptError, ResourceError
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node, place_of

MISTAKES = 2
NOT_READY = 3  # a blocker on this machine, or something that decides was not checked
FIELDS = "|".join(Recipe.model_fields)
KEY = re.compile(rf"`(?:{FIELDS})(?:\.\w+|\[\d+\])*`|\b(?:{FIELDS})(?:\.\w+|\[\d+\])+")  # `stage`, or model.path


@dataclass
class PreflightReport:
    mistakes: list[CptError] = field(default_factory=list)
    """Wrong on any machine: in the recipe, or in the files that it names."""
    blockers: list[CptError] = field(default_factory=list)
    """Would stop the run on this machine: a missing package, too little disk, a run that has to finish first."""
    unchecked: list[str] = field(default_factory=list)
    """Decides whether the run works, and cannot be checked here."""
    warnings: list[str] = field(default_factory=list)
    """Works, but outside of published bands."""
    plan: dict[str, Any] | None = None
    """Planned memory and speed on the GPUs of this machine."""

    @property
    def exit_code(self) -> int:
        return MISTAKES if self.mistakes else NOT_READY if self.blockers or self.unchecked else 0

    def add(self, problem: CptError) -> None:
        """Note a mistake, or a blocker if the machine lacks something."""
        (self.blockers if isinstance(problem, ResourceError) else self.mistakes).append(problem)

    def run(self, check: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """The check's result, or None with its error noted."""
        try:
            return check(*arguments, **options)
        except CptError as problem:
            self.add(problem)
            return None


def placed(message: str, root: Node | None) -> str:
    """The message with the file and line of the key it names in front."""
    key = KEY.search(message)
    if root is None or key is None:
        return message
    location = tuple(int(step) if step.isdigit() else step for step in re.findall(r"\w+", key.group()))
    place = place_of(root, location)
    return message if message.startswith(f"{place.file}:") else f"{place}: {message}"
