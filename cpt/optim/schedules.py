"""Learning-rate schedules: the factor on the peak learning rate, as a function of the tokens trained so far.

In tokens and not in steps, so that another batch size or number of GPUs leaves the curve where it was.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.optim.lr_scheduler import LambdaLR

from cpt.errors import RecipeError
from cpt.extend import check_options, find
from cpt.recipe.schema import Schedule


def build_schedule(section: Schedule, optimizer: torch.optim.Optimizer, *, tokens_per_step: int, total_tokens: int) -> LambdaLR:
    """The scheduler that the recipe names, to be stepped once per optimizer step.

    Raises:
        RecipeError: no such schedule, an option it does not take, or a warm-up longer than the run.
    """
    factor = find("schedule", section.name, SCHEDULES)
    check_options(factor, section.options, "schedule")
    warmup_tokens = section.options.get("warmup_tokens", 0)
    if warmup_tokens > total_tokens:
        raise RecipeError(f"`schedule.warmup_tokens` is {warmup_tokens:,}, but the whole run has {total_tokens:,} tokens.")
    return LambdaLR(optimizer, partial(factor_at_step, factor, section.options, tokens_per_step, total_tokens))


def factor_at_step(factor: Callable[..., float], options: dict[str, object], tokens_per_step: int, total_tokens: int, step: int) -> float:
    """The factor for optimizer step number `step`, counted from 0: at its end (step + 1) * tokens_per_step tokens are trained."""
    return factor((step + 1) * tokens_per_step, total_tokens, **options)


def constant(tokens: float, total_tokens: float, *, warmup_tokens: float = 0) -> float:
    """Warm up, then stay at the peak."""
    return warmup(tokens, warmup_tokens)


def linear(tokens: float, total_tokens: float, *, warmup_tokens: float = 0, floor: float = 0.0) -> float:
    """Warm up, then fall in a straight line to `floor` times the peak."""
    if tokens < warmup_tokens:
        return warmup(tokens, warmup_tokens)
    return floor + (1 - floor) * (1 - progress(tokens, total_tokens, warmup_tokens))


def cosine(tokens: float, total_tokens: float, *, warmup_tokens: float = 0, floor: float = 0.1) -> float:
    """Warm up (for continued pre-training: re-warm, arXiv 2403.08763), then half a cosine down to `floor` times the peak."""
    if tokens < warmup_tokens:
        return warmup(tokens, warmup_tokens)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress(tokens, total_tokens, warmup_tokens)))


def warmup(tokens: float, warmup_tokens: float) -> float:
    """From 0 to 1 over the first `warmup_tokens`."""
    return min(1.0, tokens / warmup_tokens) if warmup_tokens else 1.0


def progress(tokens: float, total_tokens: float, warmup_tokens: float) -> float:
    """Share of the way from the end of the warm-up to the end of the run, 0 to 1."""
    return min(1.0, (tokens - warmup_tokens) / max(1, total_tokens - warmup_tokens))


SCHEDULES: dict[str, Callable[..., float]] = {"constant": constant, "linear": linear, "cosine": cosine}
