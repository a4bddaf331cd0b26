"""Held-out pairs, rated answers and prompts of a run: its trainer's figures before and after.

Accuracy is the share of pairs in which the better answer has the higher reward. Stages with a reference measure
rewards against the initial model, so before the first step they are all 0, and chance is half of the pairs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpt.evaluation.paired import LEVEL, NEGLIGIBLE, TOO_FEW, accuracy_interval
from cpt.evaluation.retention import read_evaluations
from cpt.runs.folder import EVALUATED

COUNT = "_examples"
ACCURACIES, MARGINS = ("rewards/accuracies", "accuracy"), ("rewards/margins", "margin")
REWARD = "reward"
NEW_HEAD = "accuracy"  # the name that only a reward model's accuracy has, whose head is new
CHANCE = 0.5
NOISE = 1e-3  # of log-probabilities in half precision, which the model and its equal, the reference, may differ by


@dataclass(frozen=True)
class ExampleSet:
    """One held-out set; each figure before the first step and after the last, None if the stage has none."""

    name: str
    examples: int
    loss: tuple[float, float] | None = None
    accuracy: tuple[float, float] | None = None
    margin: tuple[float, float] | None = None
    reward: tuple[float, float] | None = None
    """The mean of the recipe's rewards."""
    has_reference: bool = False
    """Rewards are against the model that the run began with, so that before it no pair could be told apart."""
    is_new_head: bool = False
    """The head that gives the rewards was drawn at random."""

    @property
    def is_against_chance(self) -> bool:
        """Whether the accuracy before the run means nothing, so that half of the pairs is the comparison."""
        return self.has_reference or self.is_new_head

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the accuracy after the run."""
        if self.accuracy is None:
            return None
        return accuracy_interval(np.arange(self.examples) < round(self.accuracy[1] * self.examples))

    @property
    def worked(self) -> bool | None:
        """Whether the model orders pairs better than by chance; None if the interval or the stage leaves it open."""
        if self.interval is None or not self.is_against_chance or self.examples < TOO_FEW:
            return None
        low, high = self.interval
        return True if low > CHANCE else False if high < CHANCE + NEGLIGIBLE else None

    def sentence(self) -> str:
        if self.accuracy is not None and self.interval is not None:
            low, high = self.interval
            spread = f"{100 * LEVEL:.0f} % interval {100 * low:.0f} to {100 * high:.0f} %"
            share = f"{100 * self.accuracy[1]:.0f} % of {self.examples:,} held-out pairs ({spread})"
            if not self.is_against_chance:
                before = f"before the run in {100 * self.accuracy[0]:.0f} %"
                return f"In {share} the better answer is the likelier one; {before}."
            outcome = {True: "It worked", False: "It did not work", None: "Whether it worked is unknown"}[self.worked]
            outcome = "It did harm" if self.worked is False and high < CHANCE else outcome
            return f"{outcome}: in {share} the better answer has the higher reward; half would be chance."
        margin = "the margin of wanted over unwanted answers"
        others = {"the mean reward": self.reward, margin: self.margin, "the loss": self.loss}
        changes = [f"{what} went from {one[0]:.3f} to {one[1]:.3f}" for what, one in others.items() if one is not None]
        found = " and ".join(changes) or "nothing was measured"
        return f"On {self.examples:,} held-out examples {found}; no interval can be given."


def read_example_sets(metrics: Path) -> list[ExampleSet]:
    """The sets with figures before the first step and later; the last evaluation counts."""
    evaluated = {log["step"]: log for log in read_evaluations(metrics) if any(key.endswith(COUNT) for key in log)}
    if 0 not in evaluated or len(evaluated) < 2:
        return []
    before, after = evaluated[0], evaluated[max(evaluated)]
    names = [key[len(EVALUATED) : -len(COUNT)] for key in before if key.endswith(COUNT) and key in after]
    return [example_set(name, before, after) for name in names]


def example_set(name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> ExampleSet:

    def both(*figures: str) -> tuple[float, float] | None:
        keys = [f"{EVALUATED}{name}_{figure}" for figure in figures]
        return next(((before[key], after[key]) for key in keys if key in before and key in after), None)

    reward, likelihood = both("rewards/chosen"), both("logps/chosen")
    return ExampleSet(
        name,
        int(after[f"{EVALUATED}{name}{COUNT}"]),
        both("loss"),
        both(*ACCURACIES),
        both(*MARGINS),
        both(REWARD),
        has_reference=reward is not None and likelihood is not None and abs(reward[0]) <= NOISE * abs(likelihood[0]),
        is_new_head=both(NEW_HEAD) is not None,
    )
