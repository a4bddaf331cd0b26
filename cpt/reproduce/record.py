"""What a run left of itself for whoever repeats it."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpt.errors import CheckpointError
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.folder import ENVIRONMENT, INPUTS, RECIPE, STARTS, read_objects

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Record:
    """Of one run."""

    folder: Path
    recipe: Recipe
    environment: dict[str, Any]
    """Of its first start."""
    inputs: dict[str, Any]
    lines: list[dict[str, Any]]
    """Of its metrics, the oldest first."""
    starts: list[dict[str, Any]] = field(default_factory=list)
    """Its later starts: what differed from the first."""

    @property
    def processes(self) -> int:
        """It ran in so many."""
        return int(self.environment.get("processes", 1))

    @property
    def place(self) -> Path:
        """The folder from which its relative paths count."""
        return place_of(self.environment)

    def first_log_from(self, step: int) -> int | None:
        """The first step from this one on whose loss was logged: logs hold the mean since the log before."""
        return next((int(line["step"]) for line in self.lines if "loss" in line and line["step"] >= step), None)


def read_record(folder: Path) -> Record:
    """All of it.

    Raises:
        CheckpointError: it is no run, or something of it is missing or damaged.
        RecipeError: its recipe has keys that this version does not know.
    """
    if not (folder / RECIPE).is_file():
        raise CheckpointError(f"{folder} is no run's folder: it has no {RECIPE}. Name one: output_dir/name.")
    environment, inputs = contents(folder / ENVIRONMENT), contents(folder / INPUTS)
    lines = lines_of(folder / METRICS)
    if not any("loss" in line for line in lines):
        raise CheckpointError(
            f"{folder / METRICS} holds no loss, so there is nothing to compare with. Let the run make its first log."
        )
    recipe, starts = (folder / RECIPE).resolve(), read_objects(folder / STARTS, [])
    with contextlib.chdir(place_of(environment)):
        return Record(folder, load_recipe(recipe), environment, inputs, lines, starts)


def place_of(environment: dict[str, Any]) -> Path:
    """The folder that the run was started in; this one, where that is gone."""
    started_in = Path(environment.get("folder", "."))
    return started_in if started_in.is_dir() else Path.cwd()


def contents(path: Path) -> dict[str, Any]:
    """Of a JSON file that is an object.

    Raises:
        CheckpointError: there is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise CheckpointError(
            f"{path} cannot be read ({problem}): without it nobody knows what the run consisted of."
        ) from problem
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is no record of a run: it holds no object.")
    return content


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics that are whole."""
    return [line for line in read_objects(path, []) if isinstance(line.get("step"), int)]
