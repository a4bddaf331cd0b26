"""Who ends trials early: Optuna's pruners by name, with their lengths in tokens."""

from collections.abc import Callable
from typing import Any

from cpt.errors import RecipeError
from cpt.extend import check_options, find
from cpt.search.library import optuna
from cpt.search.settings import Settings


def build_pruner(settings: Settings, total_tokens: int | None) -> Any:
    """The pruner that the space names.

    Args:
        total_tokens: of a trial; None where the recipe gives its length in epochs.

    Raises:
        RecipeError: no such pruner, or an option it does not take.
    """
    section = settings.pruner
    build = find("pruner", section.name, PRUNERS)
    check_options(build, section.options, "search.pruner")
    return build(total_tokens, **section.options)


def none(total_tokens: int | None) -> Any:
    """Every trial runs to its end."""
    return optuna().pruners.NopPruner()


def median(total_tokens: int | None, *, startup_trials: int = 4, warmup_tokens: int = 0) -> Any:
    """End a trial whose best value so far is worse than the median of the earlier ones at the same number of tokens.

    Args:
        startup_trials: that come to their end before any is compared with them.
        warmup_tokens: before which none is ended.
    """
    return percentile(total_tokens, keep=50.0, startup_trials=startup_trials, warmup_tokens=warmup_tokens)


def percentile(total_tokens: int | None, *, keep: float, startup_trials: int = 4, warmup_tokens: int = 0) -> Any:
    """As median, with another bound.

    Args:
        keep: per cent of the trials, the best, that go on.
    """
    if not 0 < keep < 100:
        raise RecipeError(f"`search.pruner.keep` is a share in per cent, above 0 and below 100, got {keep:g}.")
    return optuna().pruners.PercentilePruner(keep, n_startup_trials=startup_trials, n_warmup_steps=warmup_tokens)


def halving(total_tokens: int | None, *, least_tokens: int | None = None, reduction_factor: int = 3) -> Any:
    """Successive halving (ASHA, arXiv 1810.05934): at each rung the best `1/reduction_factor` of the trials go on.

    Args:
        least_tokens: the first rung; by default a 27th of the run.
    """
    least = least_tokens or length(total_tokens, "halving") // reduction_factor**3
    return optuna().pruners.SuccessiveHalvingPruner(min_resource=max(1, least), reduction_factor=reduction_factor)


def hyperband(total_tokens: int | None, *, least_tokens: int | None = None, reduction_factor: int = 3) -> Any:
    """Successive halving from several first rungs at once, for who does not know when trials can be told apart (arXiv
    1603.06560).

    Args:
        least_tokens: the earliest first rung; by default a 27th of the run.
    """
    total = length(total_tokens, "hyperband")
    least = max(1, least_tokens or total // reduction_factor**3)
    return optuna().pruners.HyperbandPruner(min_resource=least, max_resource=total, reduction_factor=reduction_factor)


def length(total_tokens: int | None, pruner: str) -> int:
    """Of a trial.

    Raises:
        RecipeError: it is not known in tokens.
    """
    if total_tokens is None:
        raise RecipeError(
            f"`search.pruner: {pruner}` counts in tokens: write the recipe's `budget.tokens`, or take another pruner."
        )
    return total_tokens


PRUNERS: dict[str, Callable[..., Any]] = {
    "median": median,
    "percentile": percentile,
    "halving": halving,
    "hyperband": hyperband,
    "none": none,
}
