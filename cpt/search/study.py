"""Optuna's study of a search: sampler, pruner, and the trials so far, in one SQLite file or at a storage URL."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from math import prod
from socket import gethostname
from typing import Any

import numpy as np

from cpt.errors import RecipeError, ResourceError
from cpt.extend import find
from cpt.recipe.section import Component
from cpt.search.space import Space, import_optuna

HOST, REASON = "host", "reason"  # attributes of a trial: the machine that runs it; why it did not come to its end
GRID = "grid"


def open_study(url: str, name: str, space: Space) -> Any:
    """The study with all trials that were made already; a new grid's trials wait in it.

    Raises:
        RecipeError: an option that the sampler or pruner does not take, or a range without steps in a grid.
        ResourceError: the storage cannot be read or written.
    """
    optuna, settings = import_optuna(), space.settings
    build_sampler(space, 0)
    pruners = {
        "median": optuna.pruners.MedianPruner,
        "percentile": optuna.pruners.PercentilePruner,
        "halving": optuna.pruners.SuccessiveHalvingPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "none": optuna.pruners.NopPruner,
    }
    pruner = build("pruner", settings.pruner, pruners, space)
    grid = list(product(*values_of_grid(space))) if settings.sampler.name == GRID else []
    with storage_errors(url, RuntimeError):  # of Optuna: another version has written it
        study = optuna.create_study(
            storage=url, study_name=name, direction=settings.direction, pruner=pruner, load_if_exists=True
        )
        for values in grid[: settings.trials]:
            study.enqueue_trial(dict(zip(space.distributions, values, strict=True)), skip_if_exists=True)
    return study


def values_of_grid(space: Space) -> Iterator[list[Any]]:
    """All values of each key.

    Raises:
        RecipeError: a range of numbers has no step.
    """
    for axis in space.axes:
        distribution = vars(axis.distribution)
        if "choices" in distribution:
            yield list(axis.ends)
        elif (step := axis.distribution.step) is None or axis.distribution.log:
            raise RecipeError(f"{axis.place}: `sampler: grid` needs a `step` or a list of values for `{axis.key}`.")
        else:
            low, high = axis.ends
            yield [low + index * step for index in range(round((high - low) / step) + 1)]


def build_sampler(space: Space, number: int) -> Any:
    """The sampler of trial `number`, seeded by the search's seed and that number.

    A new one for each trial draws after a kill what it would have drawn without: all that samplers know is in the
    study.
    """
    samplers = import_optuna().samplers
    seed = int(np.random.SeedSequence([space.settings.seed, number]).generate_state(1)[0])
    known = {"tpe": samplers.TPESampler, "random": samplers.RandomSampler, GRID: samplers.RandomSampler}
    return build("sampler", space.settings.sampler, known, space, seed=seed)


def build(kind: str, section: Component, known: Mapping[str, Callable[..., Any]], space: Space, **given: Any) -> Any:
    """A sampler or a pruner by its name, with Optuna's own options.

    Raises:
        RecipeError: no such name or option, or a value that Optuna refuses.
    """
    try:
        return find(kind, section.name, known)(**given, **section.options)
    except (TypeError, ValueError, RecipeError) as problem:
        raise RecipeError(f"{space.place}: `search.{kind}`: {problem}") from problem


def ask(study: Any, space: Space) -> Any:
    """The next trial with its values drawn; None if all were started.

    Raises:
        RecipeError: a list of values changed since the search began.
    """
    trials = study.get_trials(deepcopy=False)
    total = space.settings.trials
    if space.settings.sampler.name == GRID:
        total = min(total, prod(map(len, values_of_grid(space))))
    started = sum(trial.state.name != "WAITING" for trial in trials)
    if started >= total:
        return None
    study.sampler = build_sampler(space, started)
    try:
        trial = study.ask(space.distributions)
    except ValueError as problem:
        raise RecipeError(
            f"the space does not fit the trials so far: {problem} Start a new search: --new."
        ) from problem
    trial.set_user_attr(HOST, gethostname())
    return trial


def unfinished(study: Any, space: Space) -> list[Any]:
    """The trials that an earlier search on this machine left, to continue with the same values."""
    optuna = import_optuna()
    running = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    own = [trial for trial in running if trial.user_attrs.get(HOST) == gethostname()]
    for trial in own:
        if trial.params.keys() != space.distributions.keys():  # killed while the values were drawn
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    # `_trial_id`: Optuna has no public way to continue a trial of another process.
    return [
        optuna.trial.Trial(study, trial._trial_id)
        for trial in own
        if trial.params.keys() == space.distributions.keys()
    ]


@contextmanager
def storage_errors(url: str, *further: type[Exception]) -> Iterator[None]:
    """Turn the database's errors into one with a remedy.

    Raises:
        ResourceError: it cannot be read or written.
    """
    import sqlalchemy.exc

    try:
        yield
    except (import_optuna().exceptions.StorageInternalError, sqlalchemy.exc.SQLAlchemyError, *further) as problem:
        cause: BaseException = problem
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = str(cause).partition("\n")[0]
        raise ResourceError(
            f"the study {url} cannot be read or written: {reason}. Free disk space or repair it, then give the same"
            " command again; or start anew: --new."
        ) from problem
