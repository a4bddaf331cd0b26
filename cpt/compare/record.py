"""All that a run's folder tells a comparison, read as far as it can be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cpt.errors import CheckpointError
from cpt.evaluation.kept_losses import DocumentLosses, kept_losses, load_losses
from cpt.recipe.run_results import RECIPE
from cpt.runs.folder import (
    ENVIRONMENT,
    EVENTS,
    INPUTS,
    METRICS,
    Content,
    Metrics,
    read_metrics,
    read_object,
    read_objects,
    read_recipe,
    read_status,
)

STARTS, VERDICT = "starts.jsonl", "verdict.json"
FIGURES = (
    *("loss", "tokens_per_second", "mfu", "data_wait", "step_seconds_p50", "step_seconds_p95"),
    *("gpu_memory_peak_gib", "host_memory_gib", "cost", "train_runtime", "eval_*"),
)


@dataclass(frozen=True)
class Record:
    """A run, as its folder tells; what is not there is empty."""

    folder: Path
    name: str
    """How the comparison calls it: as short as it can be told from the others."""
    recipe: Content
    """As it is written, without defaults of this version."""
    starts: list[Content]
    """environment.json, and what later starts found."""
    inputs: Content
    status: Content
    verdict: Content
    metrics: Metrics
    events: list[Content]
    losses: Mapping[str, DocumentLosses] = field(default_factory=dict)
    """By held-out set, of the last evaluation."""
    losses_step: int | None = None
    unreadable: list[str] = field(default_factory=list)

    @cached_property
    def state(self) -> str:
        """finished, running, died, ..."""
        return str(self.status.get("state", "unknown"))

    @cached_property
    def stage(self) -> str | None:
        """Of the recipe."""
        stage = self.recipe.get("stage")
        return stage if isinstance(stage, str) else None


def read_record(folder: Path, name: str) -> Record:
    """Read a run."""
    unreadable: list[str] = []
    losses, step = losses_of(folder, unreadable)
    environment = read_object(folder / ENVIRONMENT, unreadable)
    return Record(
        folder=folder,
        name=name,
        recipe=read_recipe(folder / RECIPE, unreadable),
        starts=[start for start in (environment, *read_objects(folder / STARTS, unreadable)) if start],
        inputs=read_object(folder / INPUTS, unreadable),
        status=read_status(folder),
        verdict=read_object(folder / VERDICT, unreadable),
        metrics=read_metrics(folder, FIGURES),
        events=read_objects(folder / EVENTS, unreadable),
        losses=losses,
        losses_step=step,
        unreadable=unreadable,
    )


def losses_of(folder: Path, unreadable: list[str]) -> tuple[dict[str, DocumentLosses], int | None]:
    """Of each document at the last evaluation after the first step; none where the run did not keep them."""
    steps = kept_losses(folder)
    if not steps:
        return {}, None
    last = max(steps)
    try:
        return {name: losses for name, losses in load_losses(steps[last]).items() if is_whole(losses)}, last
    except CheckpointError:
        unreadable.append(f"{steps[last]} is damaged")
        return {}, None


def is_whole(losses: DocumentLosses) -> bool:
    """All arrays are of the same documents, which have something to predict."""
    arrays = vars(losses).values()
    return (
        len({array.shape for array in arrays}) == 1
        and losses.hashes.ndim == 1
        and bool(losses.num_bytes.sum() and losses.num_tokens.sum())
    )


def missing_parts(record: Record) -> list[str]:
    """What cannot be compared of this run, a sentence each; the reason is a file that is not there, or that cannot be
    read."""
    of_files = {
        RECIPE: (record.recipe, "recipe"),
        ENVIRONMENT: (record.starts, "versions, code and machine"),
        INPUTS: (record.inputs, "data, tokenizer and weights"),
        METRICS: (len(record.metrics.columns["step"]), "losses, speed and memory"),
    }
    sentences = []
    for name, (content, what) in of_files.items():
        if not content:
            path = record.folder / name
            told = [text for text in record.unreadable if text.startswith(str(path))]
            why = told[0] if told else f"{path} is {'empty' if path.exists() else 'missing'}"
            sentences.append(f"{what} of {record.name}: {why}.")
    others = [
        text for text in record.unreadable if not any(text.startswith(str(record.folder / name)) for name in of_files)
    ]
    return [*sentences, *(f"{record.name}: {text}." for text in others)]


def short_names(folders: list[Path]) -> list[str]:
    """The last part of each path, with as many parts above it as tell two runs apart; the same folder twice is
    numbered."""
    parts = [folder.resolve().parts for folder in folders]
    length = 1
    while length < max(map(len, parts)) and len({part[-length:] for part in parts}) < len(set(parts)):
        length += 1
    names: list[str] = []
    for part in parts:
        name = "/".join(part[-length:])
        again = sum(other == name or other.startswith(f"{name} (again") for other in names)
        names.append(f"{name} (again{f' {again}' if again > 1 else ''})" if again else name)
    return names
