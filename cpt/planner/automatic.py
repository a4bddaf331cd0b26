"""What `auto` under `training:` means on a machine: the fastest micro-batch and checkpointing that fit by plan."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from cpt.planner.activations import Counted
from cpt.planner.advice import CAREFUL, HALVED, fits
from cpt.planner.facts import ModelFacts
from cpt.planner.memory import plan_memory
from cpt.planner.setup import Setup
from cpt.planner.speed import assumed_mfu, planned_speed
from cpt.planner.target import Target
from cpt.recipe.automatic import ACCUMULATION, AUTO, CHECKPOINTING, LOADING, MICRO_BATCH, automatic_keys

BUSY_TOKENS = 32_768  # in a micro-batch: more keep no GPU busier


def chosen_values(
    training: Mapping[str, Any],
    setup: Setup,
    target: Target,
    count: Callable[[Setup], tuple[ModelFacts, Counted]],
    *,
    rows: int,
    share: float = 1.0,
) -> dict[str, Any]:
    """A value for each key that says `auto`.

    Where nothing fits it is the smallest: plans are estimates, and who starts the run is warned by them elsewhere.

    Args:
        setup: the recipe's, with anything in the place of what is chosen.
        rows: of a step, on each process; micro-batches divide it.
        share: of a GPU's memory that the run may have.
    """
    asked = automatic_keys(training)
    values: dict[str, Any] = dict.fromkeys(key for key in LOADING if key in asked)
    if LOADING[0] in asked:
        values[LOADING[0]] = 0  # the loader's threads follow the measured wait, and go as far ahead as it asks for
    switches = [key for key in CHECKPOINTING if key in asked]
    if MICRO_BATCH in asked or switches:
        best = fastest_that_fits(
            setup,
            target,
            count,
            micro_batches=micro_batches_of(rows, setup.beside.sequences * setup.length)
            if MICRO_BATCH in asked
            else [setup.micro_batch],
            checkpointing=[False, True] if switches else [setup.checkpointing],
            share=share,
        )
        values |= {MICRO_BATCH: best.micro_batch} if MICRO_BATCH in asked else {}
        values |= dict.fromkeys(switches, best.checkpointing)
    return values | (
        {ACCUMULATION: None} if training.get(ACCUMULATION) == AUTO else {}
    )  # it follows from the global batch


def fastest_that_fits(
    setup: Setup,
    target: Target,
    count: Callable[[Setup], tuple[ModelFacts, Counted]],
    *,
    micro_batches: list[int],
    checkpointing: list[bool],
    share: float,
) -> Setup:
    """The least time for a token, where fewer tokens at once keep a GPU less busy."""
    facts, activations = count(setup)
    judged = []
    for rows, again in product(micro_batches, checkpointing):
        candidate = replace(setup, micro_batch=rows, checkpointing=again)
        if setup.sampled:  # a step's completions are sampled together, whatever the micro-batch
            candidate = replace(candidate, accumulation=max(1, setup.micro_batch * setup.accumulation // rows))
        if fits(plan_memory(facts, candidate, activations), target, share * CAREFUL):
            tokens = min(BUSY_TOKENS, candidate.tokens_at_once)
            idle = HALVED ** math.log2(BUSY_TOKENS / tokens)
            # The start of a run knows no links, and must choose what the plan told.
            speed = planned_speed(
                facts, candidate, replace(target, links=None), assumed_mfu(candidate)
            ).tokens_per_second
            judged.append((speed / idle, -rows, candidate))
    if not judged:
        return replace(setup, micro_batch=min(micro_batches), checkpointing=any(checkpointing))
    return max(judged, key=lambda found: found[:2])[2]


def micro_batches_of(rows: int, tokens_of_row: int) -> list[int]:
    """What divides the rows of a step, up to what keeps a GPU busy."""
    most = max(1, BUSY_TOKENS // tokens_of_row)
    return [size for size in range(1, min(rows, most) + 1) if rows % size == 0]
