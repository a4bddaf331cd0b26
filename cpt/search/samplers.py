"""Who draws the values of a trial: Optuna's samplers by name, seeded for each trial by itself."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from cpt.errors import RecipeError
from cpt.extend import check_options, find
from cpt.search.library import optuna
from cpt.search.space import Space


def build_sampler(space: Space, number: int) -> Any:
    """The sampler for trial `number`.

    It is made anew for each trial, from the search's seed and the trial's number: so a search that was killed draws
    what it would have drawn, since all else that samplers know is in the study.

    Raises:
        RecipeError: no such sampler, an option it does not take, or a space that it cannot draw from.
    """
    section = space.settings.sampler
    build = find("sampler", section.name, SAMPLERS)
    check_options(build, section.options, "search.sampler")
    seed = np.random.SeedSequence([space.settings.seed, number]).generate_state(1)[0]
    return build(space, int(seed), **section.options)


def tpe(space: Space, seed: int, *, startup_trials: int | None = None, multivariate: bool = True) -> Any:
    """Tree-structured Parzen estimators: values like those of the better trials, unlike those of the others (arXiv
    2304.11127).

    Args:
        startup_trials: drawn at random before; by default a quarter of all, 4 to 10.
        multivariate: draw all keys together, so that what goes with what is learned too.
    """
    quarter = min(10, max(4, space.settings.trials // 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
        return optuna().samplers.TPESampler(
            n_startup_trials=quarter if startup_trials is None else startup_trials,
            multivariate=multivariate,
            seed=seed,
        )


def random(space: Space, seed: int) -> Any:
    """Each value by itself, evenly: hard to beat with few trials, and the honest comparison."""
    return optuna().samplers.RandomSampler(seed=seed)


def grid(space: Space, seed: int) -> Any:
    """Every combination once, in an order drawn from the seed.

    Raises:
        RecipeError: a range has no step, so its values cannot be counted.
    """
    values = space.grid()
    if values is None:
        endless = [axis for axis in space.axes if axis.grid is None]
        raise RecipeError(
            f"{endless[0].place}: `sampler: grid` needs values that can be counted: give `{endless[0].key}` a `step`"
            " or a list."
        )

    class Grid(optuna().samplers.GridSampler):  # type: ignore[misc]
        """The search counts the points itself: Optuna's own would end a loop of Optuna's, which there is none of."""

        def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
            """Nothing."""

    return Grid(
        values, seed=space.settings.seed
    )  # which shuffles the points: the study remembers them by their places


def qmc(space: Space, seed: int) -> Any:
    """Spread more evenly than by chance (Sobol's sequence); for a first look at a space."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna().exceptions.ExperimentalWarning)
        # Its place in the sequence stands in the study, which belongs to one seed.
        return optuna().samplers.QMCSampler(scramble=True, seed=space.settings.seed, warn_independent_sampling=False)


SAMPLERS: dict[str, Callable[..., Any]] = {"tpe": tpe, "random": random, "grid": grid, "qmc": qmc}
