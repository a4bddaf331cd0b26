"""Which checkpoints stay: the last ones, each k-th, the best; a rule of the user's own may say otherwise."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.checkpoints.manifest import read_manifest, wrong_names_and_sizes
from cpt.checkpoints.transaction import remove
from cpt.errors import CheckpointError, RecipeError
from cpt.plugins import check_options, find
from cpt.recipe.schema import Component

STATE = "trainer_state.json"


@dataclass(frozen=True)
class Published:
    step: int
    tokens: int
    folder: Path
    metrics: Mapping[str, float]
    """What the evaluation at its step found, as in metrics.jsonl: `eval_general_loss`, ..."""


Rule = Callable[..., Collection[Published]]


def newest(
    checkpoints: Sequence[Published], *, last: int = 3, every: int | None = None, best: str | None = None
) -> list[Published]:
    """The last ones, and of those before each k-th and the best.

    Args:
        checkpoints: oldest first.
        last: how many of the newest stay.
        every: those whose step is a multiple of this stay for good.
        best: a figure of the evaluation; the checkpoint where it was lowest stays too.

    Raises:
        RecipeError: no checkpoint could ever stay.
    """
    if last < 1 or every is not None and every < 1:
        raise RecipeError(f"`checkpoints.keep`: last and every must be 1 or more, got last {last}, every {every}.")
    kept = [*checkpoints[-last:]]
    if every is not None:
        kept += [checkpoint for checkpoint in checkpoints if checkpoint.step % every == 0]
    if best is not None:
        measured = [checkpoint for checkpoint in checkpoints if best in checkpoint.metrics]
        kept += [min(measured, key=lambda checkpoint: checkpoint.metrics[best])] if measured else checkpoints[-1:]
    return kept


RULES: dict[str, Rule] = {"newest": newest}


def find_rule(keep: Component) -> Rule:
    """The rule that the recipe names, its options checked.

    Raises:
        RecipeError: no such rule, or an option that it does not take.
    """
    try:
        rule = find("rule", keep.name, RULES)
    except RecipeError as problem:
        raise RecipeError(f"`checkpoints.keep.name`: {problem}") from problem
    check_options(rule, keep.options, "checkpoints.keep")
    if keep.name in RULES:
        rule([], **keep.options)  # whether the values make sense
    return rule


def rotate(
    folder: Path, keep: Component | None, *, prefix: str = "checkpoint-", spared: Collection[Path] = ()
) -> list[Path]:
    """Remove what the rule does not keep, right after a new checkpoint was published; the newest whole one always
    stays.

    A folder without a sound manifest, or with files missing or cut short, is not counted and not touched.

    Args:
        keep: the recipe's rule; None keeps all.
        spared: folders that something still reads.

    Returns:
        What was removed.
    """
    if keep is None:
        return []
    whole = published_in(folder, prefix)
    kept = (
        {checkpoint.folder for checkpoint in find_rule(keep)(whole, **keep.options)}
        | {c.folder for c in whole[-1:]}
        | set(spared)
    )
    leaving = [checkpoint.folder for checkpoint in whole if checkpoint.folder not in kept]
    for path in leaving:
        remove(path)
    return leaving


def published_in(folder: Path, prefix: str = "checkpoint-") -> list[Published]:
    """The checkpoints that are whole as far as names and sizes tell, by step."""
    found = []
    for path in folder.glob(f"{prefix}*"):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        if not wrong_names_and_sizes(path, manifest):
            found.append(Published(manifest.step, manifest.tokens, path, metrics_of(path, manifest.step)))
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def metrics_of(folder: Path, step: int) -> dict[str, float]:
    if not (folder / STATE).is_file():
        return {}
    history: list[dict[str, Any]] = json.loads((folder / STATE).read_text())["log_history"]
    lines = [line for line in history if line["step"] == step]
    return {name: value for line in lines for name, value in line.items() if name.startswith("eval_")}
