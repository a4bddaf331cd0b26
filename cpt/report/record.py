"""All that a run's folder holds, read as far as it can be, and what could not."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpt.errors import CheckpointError
from cpt.report.found import mapping, number
from cpt.runs.folder import Metrics, read_metrics, read_object, read_objects, read_recipe, read_status

RECIPE, STATUS, METRICS = "recipe.yaml", "status.json", "metrics.jsonl"
ENVIRONMENT, INPUTS, PLAN, VERDICT = "environment.json", "inputs.json", "plan.json", "verdict.json"
STARTS, EVENTS, SAMPLES = "starts.jsonl", "events.jsonl", "samples.jsonl"


@dataclass(frozen=True)
class Record:
    """A run's folder. What is not there is empty."""

    folder: Path
    recipe_text: str
    recipe: dict[str, Any]
    metrics: Metrics
    environment: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    """A sentence for each file, or part of one, that cannot be read."""

    @property
    def tokens(self) -> float | None:
        """Trained on so far."""
        return self.metrics.last("tokens")

    @property
    def tokens_per_step(self) -> float | None:
        """As logged, else as the recipe asks."""
        tokens, step = self.tokens, self.metrics.last("step")
        return tokens / step if tokens and step else number(self.recipe, "budget", "global_batch_tokens")

    @property
    def general_sets(self) -> set[str]:
        """Held-out sets that must not be forgotten."""
        return set(mapping(self.recipe, "evaluation", "retain"))


def read_record(folder: Path) -> Record:
    """Read all there is.

    Raises:
        CheckpointError: this is not the folder of a run.
    """
    if not any((folder / name).is_file() for name in (RECIPE, STATUS, METRICS)):
        why = "has neither recipe.yaml nor status.json nor metrics.jsonl" if folder.is_dir() else "is no folder"
        raise CheckpointError(
            f"{folder} {why}, so it is no run. Name the folder of one: output_dir/name of its recipe; `cpt runs` lists"
            " them."
        )
    unreadable: list[str] = []
    read_object(folder / STATUS, unreadable)  # for what is wrong with it
    return Record(
        folder=folder,
        recipe_text=text_of(folder / RECIPE),
        recipe=read_recipe(folder / RECIPE, unreadable),
        metrics=read_metrics(folder),
        environment=read_object(folder / ENVIRONMENT, unreadable),
        inputs=read_object(folder / INPUTS, unreadable),
        plan=read_object(folder / PLAN, unreadable),
        status=read_status(folder),
        verdict=read_object(folder / VERDICT, unreadable),
        starts=read_objects(folder / STARTS, unreadable),
        events=read_objects(folder / EVENTS, unreadable),
        samples=read_objects(folder / SAMPLES, unreadable),
        unreadable=[f"{sentence}." for sentence in unreadable],
    )


def text_of(path: Path) -> str:
    """As it is written; empty where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
