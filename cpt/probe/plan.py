"""Which short runs a probe makes of a recipe, what they cost, and what has to be true of the recipe first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cpt.errors import DataError, RecipeError
from cpt.evaluation.tasks import DOMAIN_TEST
from cpt.extend import did_you_mean, find
from cpt.optim.schedules import PARTS, SCHEDULES, factor_at_step
from cpt.recipe.schema import Checkpoints, Component, Monitoring, Recipe
from cpt.recipe.sense_data import reported_name
from cpt.recipe.sense_evaluation import GENERAL_TEXT
from cpt.stages.length import RunLength, run_length

SHARES = (0.0, 0.1, 0.3)
SLOWER = 3.0  # without --rates: the recipe's learning rate, and the recipe's over this
PART = 0.2  # of the recipe's budget that all runs together may take unless --probe-tokens says otherwise
LONGER = 2  # the run that is held back is so many times as long as the others
READINGS = 8  # of each run
FEWEST_STEPS = 3 * READINGS
NO_SHARE = 1e-9  # a weight must be more than 0; of so little no row is ever read
FEWEST_DOCUMENTS = 2  # of a held-out set


@dataclass(frozen=True)
class ProbeRun:
    """One short run."""

    share: float
    """Of replay."""
    rate: float
    """The peak learning rate."""
    steps: int

    def name(self, tokens_per_step: int) -> str:
        """Of its folder."""
        return f"replay{self.share:g}-rate{self.rate:g}-{self.steps * tokens_per_step}"


@dataclass(frozen=True)
class Plan:
    """All of a probe before it starts."""

    recipe: Recipe
    domain: list[str]
    general: list[str]
    """Held-out sets."""
    replayed: list[int]
    """Numbers of the sources that are replay."""
    shares: list[float]
    rates: list[float]
    length: RunLength
    """Of the whole run."""
    steps: int
    """Of a short one."""

    @property
    def folder(self) -> Path:
        """Where the short runs go."""
        return self.recipe.output_dir / f"{self.recipe.name}-probe"

    @cached_property
    def grid(self) -> list[ProbeRun]:
        """The runs that the law is fitted to."""
        return [ProbeRun(share, rate, self.steps) for share in self.shares for rate in self.rates]

    @property
    def tokens(self) -> int:
        """Of all runs together, the one that is held back included."""
        return (len(self.grid) + LONGER) * self.steps * self.length.tokens_per_step

    @property
    def cost(self) -> float:
        """Over the recipe's budget."""
        return self.tokens / self.length.tokens

    def held_back(self, share: float, rate: float) -> ProbeRun:
        """The longer run that the forecast has to stand."""
        return ProbeRun(share, rate, LONGER * self.steps)

    def weights(self, share: float) -> dict[int, float]:
        """Source's number -> its weight where replay has this share; the others, and the replay's own parts, keep
        their proportions."""
        sources = self.recipe.data.sources
        whole = {True: sum(sources[n].weight for n in self.replayed)}
        whole[False] = sum(source.weight for source in sources) - whole[True]
        parts = {True: max(share, NO_SHARE), False: 1 - share}
        return {
            n: float(f"{parts[n in self.replayed] * one.weight / whole[n in self.replayed]:.6g}")
            for n, one in enumerate(sources)
        }

    def overrides(self, share: float, rate: float) -> list[str]:
        """How to write this into the recipe."""
        weights = self.weights(share) if self.replayed else {}
        return [
            *(f"data.sources.{number}.weight={weight:g}" for number, weight in weights.items()),
            f"optimizer.learning_rate={rate:g}",
        ]

    def rates_of_steps(self, rate: float, steps: int | None = None) -> NDArray[np.float64]:
        """The learning rate of each step, of a short run or of the whole one."""
        number = steps or self.length.steps
        schedule = self.recipe.schedule.model_copy(update=self.scaled_parts(number))
        factor = find("schedule", schedule.name, SCHEDULES)
        each = self.length.tokens_per_step
        return rate * np.array(
            [factor_at_step(factor, schedule.options, each, number * each, step) for step in range(number)]
        )

    def scaled_parts(self, steps: int) -> dict[str, int]:
        """The schedule's parts for a run of so many steps: the same curve, shorter."""
        ratio = steps / self.length.steps
        return {
            part: max(1, round(ratio * tokens)) for part in PARTS if (tokens := self.recipe.schedule.options.get(part))
        }

    def recipe_of(self, run: ProbeRun) -> Recipe:
        """The user's recipe as a short run: same model, data, batch and held-out sets; nothing is sampled, tracked or
        kept."""
        recipe = self.recipe
        weights = self.weights(run.share) if self.replayed else {}
        sources = [
            one.model_copy(update={"weight": weights.get(n, one.weight)}) for n, one in enumerate(recipe.data.sources)
        ]
        changed = {
            "name": run.name(self.length.tokens_per_step),
            "output_dir": self.folder,
            "data": recipe.data.model_copy(update={"sources": sources, "total_tokens": None}),
            "budget": recipe.budget.model_copy(
                update={"tokens": run.steps * self.length.tokens_per_step, "epochs": None}
            ),
            "optimizer": recipe.optimizer.model_copy(update={"learning_rate": run.rate}),
            "schedule": recipe.schedule.model_copy(update=self.scaled_parts(run.steps)),
            "checkpoints": Checkpoints(),
            "monitoring": Monitoring(),
            "evaluation": recipe.evaluation.model_copy(
                update={
                    "every_tokens": None,
                    "every_steps": run.steps // READINGS,
                    "prompts": [],
                    "tasks": [
                        Component.model_validate({"name": DOMAIN_TEST, "questions": 0})
                    ],  # held-out text is what the law is about
                    "retain": dict.fromkeys(recipe.evaluation.retain),  # a probe that stopped early would tell less
                }
            ),
        }
        return recipe.model_copy(update=changed)


def check_recipe(recipe: Recipe) -> None:
    """Refuse what cannot be probed, before anything is read.

    Raises:
        RecipeError: the stage, the mixture or the held-out sets do not allow it.
    """
    if recipe.stage != "cpt":
        raise RecipeError(
            f"`stage` is {recipe.stage}: a probe compares runs with the model that they start from, so it takes"
            " recipes with `stage: cpt`."
        )
    if not recipe.evaluation.perplexity and recipe.evaluation.held_out_share is None:
        raise RecipeError(
            "the recipe holds no documents out, so a probe has nothing to measure. Give it"
            " `evaluation.held_out_share: 0.01`, or files of your own and a general set under"
            f" `evaluation.perplexity`. A public general set: {GENERAL_TEXT}"
        )
    if not recipe.evaluation.retain:
        raise RecipeError(
            "`evaluation.retain` names no general set, so a probe cannot tell what is forgotten. Name one of the"
            " held-out sets: `evaluation.retain: {general: 0.02}`. A public one, for `evaluation.perplexity`: "
            + GENERAL_TEXT
        )
    for key, is_set, without in (
        ("phases", recipe.data.phases, "[]"),
        ("temperature", recipe.data.temperature, "null"),
    ):
        if is_set:
            raise RecipeError(
                f"`data.{key}` sets the weights of the sources, which a probe has to vary. Probe without it:"
                f" `data.{key}={without}`."
            )


def replayed_sources(recipe: Recipe, named: Sequence[str], shares: Sequence[float]) -> list[int]:
    """The numbers of the sources that are replay: those named, else those called like a set of `evaluation.retain`.

    Raises:
        RecipeError: there is none and a share is asked of it, or nothing else is left.
    """
    names = [reported_name(source) for source in recipe.data.sources]
    for name in named:
        if name not in names:
            raise RecipeError(
                f"--replay {name}: no source is called so.{did_you_mean(name, names)} There is: {', '.join(names)}."
            )
    replayed = [number for number, name in enumerate(names) if name in (named or recipe.evaluation.retain)]
    if not replayed and any(shares):
        raise RecipeError(
            f"which of the sources is replay is not known: none of {', '.join(names)} is called like a set of"
            f" `evaluation.retain` ({', '.join(recipe.evaluation.retain)}). Name it: --replay {names[-1]}. Where there"
            " is none, add one, `{base: presets/replay/weak_shift.yaml}`, or try learning rates only: --shares 0"
        )
    if len(replayed) == len(names):
        raise RecipeError(
            f"all sources ({', '.join(names)}) are replay: none is left to learn from. Name those that are: --replay"
            " NAME."
        )
    return replayed


def make_plan(
    recipe: Recipe,
    tokens_of_sources: int,
    *,
    shares: Sequence[float] = (),
    rates: Sequence[float] = (),
    probe_tokens: int | None = None,
    replay: Sequence[str] = (),
) -> Plan:
    """Lay out the runs.

    Args:
        tokens_of_sources: tokens of all sources once, for a budget in epochs.
        probe_tokens: of each short run; by default so many that all of them take a fifth of the recipe's budget.

    Raises:
        RecipeError: the recipe cannot be probed, or the shares, rates or tokens are of no use.
    """
    check_recipe(recipe)
    chosen = check_numbers(
        "--shares", shares or SHARES, "shares of the tokens, from 0 to less than 1", lowest=0, below=1
    )
    peak = recipe.optimizer.learning_rate
    wanted = rates or (float(f"{peak / SLOWER:.2g}"), peak)
    tried = check_numbers(
        "--rates", wanted, "peak learning rates, more than 0 and up to 1", lowest=1e-12, below=1.000001
    )
    replayed = replayed_sources(recipe, replay, chosen)
    length = run_length(recipe, math.ceil(tokens_of_sources / recipe.data.sequence_length))
    runs = len(chosen) * len(tried) + LONGER
    steps = length.steps * PART / runs if probe_tokens is None else probe_tokens / length.tokens_per_step
    steps = int(steps) // READINGS * READINGS
    if steps < FEWEST_STEPS:
        raise RecipeError(too_short(length, runs, probe_tokens))
    if LONGER * steps > length.steps:
        raise RecipeError(
            f"--probe-tokens {probe_tokens:,}: the run that is held back, {LONGER} times as long, would be longer than"
            f" the recipe's own {length.tokens:,} tokens. Give at most {length.tokens // LONGER:,}."
        )
    held_out = [reported_name(one) for one in recipe.evaluation.perplexity]
    if recipe.evaluation.held_out_share is not None:
        held_out += [reported_name(source) for source in recipe.data.sources]
    general = list(recipe.evaluation.retain)
    domain = [name for name in dict.fromkeys(held_out) if name not in general]
    return Plan(recipe, domain, general, replayed, chosen, tried, length, steps)


def check_numbers(option: str, numbers: Sequence[float], what: str, *, lowest: float, below: float) -> list[float]:
    """Each once, in order.

    Args:
        what: the numbers that it takes, in words.

    Raises:
        RecipeError: one is out of range.
    """
    for number in numbers:
        if not lowest <= number < below:
            raise RecipeError(f"{option} takes {what}; not {number:g}.")
    return sorted(set(numbers))


def too_short(length: RunLength, runs: int, probe_tokens: int | None) -> str:
    """Why a probe of so few steps is refused, and what to give instead."""
    fewest = FEWEST_STEPS * length.tokens_per_step
    told = (
        f"a short run needs {FEWEST_STEPS} steps of {length.tokens_per_step:,} tokens, {fewest:,} tokens, to tell"
        " anything"
    )
    if probe_tokens is not None:
        return f"--probe-tokens {probe_tokens:,}: {told}. Give more."
    return (
        f"`budget`: {told}. {PART:.0%} of this recipe's {length.tokens:,} tokens are fewer for {runs - LONGER} runs"
        f" and a longer one. Try fewer --shares and --rates, or pay {runs * fewest / length.tokens:.0%} of the budget:"
        f" --probe-tokens {fewest}. Of so short a recipe, running it as it is tells as much."
    )


def check_held_out(documents: dict[str, int], plan: Plan) -> None:
    """Refuse held-out sets of too few documents.

    Args:
        documents: of each held-out set.

    Raises:
        DataError: fewer than two.
    """
    few = [
        f"{name} ({documents.get(name, 0)})"
        for name in plan.domain + plan.general
        if documents.get(name, 0) < FEWEST_DOCUMENTS
    ]
    if few:
        raise DataError(
            f"too few held-out documents to judge by: {', '.join(few)}. Hold more out: a larger"
            " `evaluation.held_out_share`, or more files under `evaluation.perplexity`. A public general set:"
            f" {GENERAL_TEXT}"
        )
