"""Learning-rate schedules: the factor on the peak learning rate as a function of the tokens trained so far, not of
steps, so that batch size and number of GPUs do not change the curve."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from cpt.errors import RecipeError
from cpt.plugins import check_options, find
from cpt.recipe.schema import Data, Phase, Recipe, Schedule

# Of a run, at which the schedule is evaluated to find where it crosses a learning rate.
POINTS = 10_000


def build_schedule(
    section: Schedule, optimizer: torch.optim.Optimizer, *, tokens_per_step: int, total_tokens: int
) -> LambdaLR:
    check_schedule(section.name, section.options, total_tokens)
    schedule = find("schedule", section.name, SCHEDULES)

    def factor_at_step(step: int) -> float:
        tokens = (step + 1) * tokens_per_step  # steps count from 0; these are trained after it
        return float(schedule(tokens, total_tokens, **section.options))

    return LambdaLR(optimizer, factor_at_step)


def check_schedule(
    name: str, options: Mapping[str, Any], total_tokens: float, key: str = "schedule"
) -> None:
    """Refuse unknown options, and parts that do not fit into the run. A `continued` schedule contains another
    schedule, under another `key`."""
    schedule = find("schedule", name, SCHEDULES)
    check_options(schedule, options, key)
    for option, value in options.items():
        if option in NOT_ZERO.get(name, ()) and value == 0:
            raise RecipeError(
                f"`{key}.{option}` is 0, so the learning rate would jump. Write more than 0."
            )
    if options.get("warmup_tokens") and options.get("warmup_share"):
        raise RecipeError(
            f"`{key}.warmup_tokens` and `{key}.warmup_share` set the same thing. Remove one of them."
        )
    parts = {part: options[part] for part in PARTS if options.get(part)}
    share = options.get("warmup_share")
    if share:
        parts["warmup_share"] = share * total_tokens
    if sum(parts.values()) > total_tokens:
        lengths = " and ".join(
            f"`{key}.{part}` is {tokens:,.0f} tokens" for part, tokens in parts.items()
        )
        raise RecipeError(f"{lengths}, but the whole schedule has {total_tokens:,.0f}. Lower them.")
    if schedule is continued:
        planned = options.get("planned_tokens") or options["trained_tokens"] + total_tokens
        inner = dict(options["schedule"])
        inner_name = str(inner.pop("name", "cosine"))
        check_schedule(inner_name, inner, planned, f"{key}.schedule")


def phases_in_tokens(recipe: Recipe) -> Data:
    """Return the recipe's `data`, where phases that end at a learning rate have an end in tokens.

    It does not depend on the number of processes, only on `budget.tokens` and the schedule.
    """
    data = recipe.data
    total = recipe.budget.tokens
    if total is None or not any(phase.until_learning_rate for phase in data.phases):
        return data
    phases: list[Phase] = []
    begins = 0
    for number, phase in enumerate(data.phases):
        key = f"`data.phases[{number}].until_learning_rate`"
        if phase.until_learning_rate is not None:
            ends = tokens_until(recipe.schedule, phase.until_learning_rate, total, key)
            if ends <= begins:
                raise RecipeError(f"{key}: the phase ends before it starts, at {ends:,} tokens.")
            phase = phase.model_copy(update={"until": ends, "until_learning_rate": None})
        elif phase.until is not None and phase.until <= begins:
            raise RecipeError(
                f"`data.phases[{number}].until` {phase.until:,} ends before it starts, at {begins:,}."
            )
        begins = phase.until or total
        phases.append(phase)
    return data.model_copy(update={"phases": phases})


def tokens_until(section: Schedule, share: float, total_tokens: int, key: str) -> int:
    """Return the token after which the learning rate stays at or below this share of its peak."""
    schedule = find("schedule", section.name, SCHEDULES)

    def factor(tokens: int) -> float:
        return float(schedule(tokens, total_tokens, **section.options))

    points = [total_tokens * point // POINTS for point in range(POINTS + 1)]
    factors = [factor(tokens) for tokens in points]
    above = [index for index, value in enumerate(factors) if value > share]
    if not above:
        raise RecipeError(
            f"{key}: the phase is empty: `{section.name}` is never above {share:g} of its peak."
        )
    last_above = above[-1]
    if last_above == POINTS or points[last_above + 1] >= total_tokens:
        ending = f"`{section.name}` ends at {factors[-1]:.3g} of its peak"
        raise RecipeError(
            f"{key} is {share:g}, but {ending}. Set a higher share, another schedule, or `until`."
        )
    before = points[last_above]
    after = points[last_above + 1]
    return bisect_left(
        range(after), True, lo=before + 1, key=lambda tokens: factor(tokens) <= share
    )


def constant(
    tokens: float, total_tokens: float, *, warmup_tokens: float = 0, warmup_share: float = 0.0
) -> float:
    """Warm up, then stay at the peak.

    Args:
        warmup_share: share of the run, instead of `warmup_tokens`.
    """
    return warmup(tokens, warmup_tokens or warmup_share * total_tokens)


def linear(
    tokens: float,
    total_tokens: float,
    *,
    warmup_tokens: float = 0,
    warmup_share: float = 0.0,
    floor: float = 0.0,
) -> float:
    """Warm up, then decay linearly to `floor` times the peak.

    Args:
        warmup_share: share of the run, instead of `warmup_tokens`.
    """
    warmup_tokens = warmup_tokens or warmup_share * total_tokens
    if tokens < warmup_tokens:
        return warmup(tokens, warmup_tokens)
    return floor + (1 - floor) * (1 - progress(tokens, total_tokens, warmup_tokens))


def cosine(
    tokens: float,
    total_tokens: float,
    *,
    warmup_tokens: float = 0,
    warmup_share: float = 0.0,
    floor: float = 0.1,
) -> float:
    """Warm up (for continued pre-training: re-warm, arXiv 2403.08763), then decay by half a cosine to `floor` times
    the peak.

    Args:
        warmup_share: share of the run, instead of `warmup_tokens`.
    """
    warmup_tokens = warmup_tokens or warmup_share * total_tokens
    if tokens < warmup_tokens:
        return warmup(tokens, warmup_tokens)
    return floor + (1 - floor) * 0.5 * (
        1 + math.cos(math.pi * progress(tokens, total_tokens, warmup_tokens))
    )


def rewarm_cosine(
    tokens: float,
    total_tokens: float,
    *,
    warmup_tokens: float,
    start: float = 0.0,
    floor: float = 0.1,
) -> float:
    """For a base whose schedule had ended: rise from its last rate to the peak, then decay by half a cosine (arXiv
    2403.08763).

    Args:
        start: the base's last learning rate as a share of this run's peak; 0 starts at zero.
        floor: the last learning rate as a share of the peak; the paper uses a tenth.
    """
    if tokens < warmup_tokens:
        return start + (1 - start) * tokens / warmup_tokens
    return cosine(tokens, total_tokens, warmup_tokens=warmup_tokens, floor=floor)


def wsd(
    tokens: float,
    total_tokens: float,
    *,
    decay_tokens: float,
    warmup_tokens: float = 0,
    warmup_share: float = 0.0,
    floor: float = 0.0,
) -> float:
    """Warm up, stay, decay: a run can continue from any checkpoint of the constant part (1 - sqrt, arXiv 2405.18392).

    Args:
        decay_tokens: length of the decay at the end; the paper uses a fifth of the run.
        warmup_share: share of the run, instead of `warmup_tokens`.
        floor: the last learning rate as a share of the peak.
    """
    decayed = (tokens - (total_tokens - decay_tokens)) / decay_tokens
    if decayed <= 0:
        return warmup(tokens, warmup_tokens or warmup_share * total_tokens)
    return floor + (1 - floor) * (1 - math.sqrt(min(1.0, decayed)))


def infinite(
    tokens: float,
    total_tokens: float,
    *,
    warmup_tokens: float,
    cooldown_tokens: float,
    anneal_tokens: float,
    constant: float = 0.5,
    floor: float = 0.1,
) -> float:
    """Warm up, cool down by a cosine to a constant rate, anneal exponentially at the end (arXiv 2403.08763).

    A run on new data continues from a checkpoint of the constant part (`schedule: {name: continued, ...}`), without
    another warm-up, which would cause forgetting.

    Args:
        cooldown_tokens: length of the decay from the peak to the constant rate.
        anneal_tokens: length of the last part, from the constant rate down to `floor`.
        constant: the constant rate as a share of the peak.
        floor: the last learning rate as a share of the peak.
    """
    if tokens < warmup_tokens:
        return warmup(tokens, warmup_tokens)
    if anneal_tokens:
        annealed = (tokens - (total_tokens - anneal_tokens)) / anneal_tokens
        if annealed > 0:
            return constant * (floor / constant) ** min(1.0, annealed)
    return cosine(
        tokens, warmup_tokens + cooldown_tokens, warmup_tokens=warmup_tokens, floor=constant
    )


def continued(
    tokens: float,
    total_tokens: float,
    *,
    schedule: dict[str, Any],
    trained_tokens: float,
    planned_tokens: float | None = None,
) -> float:
    """Continue another run's schedule from its last step; `optimizer.learning_rate` is that run's peak.

    Args:
        schedule: that run's section: `{name: infinite, warmup_tokens: ...}`.
        trained_tokens: tokens trained at the checkpoint from which this run starts.
        planned_tokens: full length of its schedule; by default it ends with this run.
    """
    options = dict(schedule)
    factor = find("schedule", str(options.pop("name", "cosine")), SCHEDULES)
    planned = planned_tokens or trained_tokens + total_tokens
    return float(factor(trained_tokens + tokens, planned, **options))


def warmup(tokens: float, warmup_tokens: float) -> float:
    if warmup_tokens:
        return min(1.0, tokens / warmup_tokens)
    return 1.0


def progress(tokens: float, total_tokens: float, warmup_tokens: float) -> float:
    """Progress from the end of the warm-up to the end of the run, 0 to 1."""
    return min(1.0, (tokens - warmup_tokens) / max(1, total_tokens - warmup_tokens))


BUILT_IN = (constant, linear, cosine, rewarm_cosine, wsd, infinite, continued)
SCHEDULES: dict[str, Callable[..., float]] = {function.__name__: function for function in BUILT_IN}
PARTS = ("warmup_tokens", "cooldown_tokens", "decay_tokens", "anneal_tokens")
NOT_ZERO = {"wsd": ("decay_tokens",), "infinite": ("cooldown_tokens", "constant", "floor")}
