"""Optuna's study of a search: sampler, pruner, and the trials so far, in one SQLite file or at a storage URL."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from socket import gethostname
from typing import Any

import numpy as np

from cpt.errors import RecipeError, ResourceError
from cpt.plugins import find
from cpt.recipe.schema import Component
from cpt.search.space import GRID, Space, import_optuna

HOST, REASON = "host", "reason"  # attributes of a trial: the machine that runs it; why it failed


def open_study(url: str, name: str, space: Space) -> Any:
    """The study with all trials that were made already; a new grid's trials wait in it.

    Raises:
        RecipeError: an option that the sampler or pruner does not take.
        ResourceError: the storage cannot be read or written.
    """
    optuna, settings = import_optuna(), space.settings
    build_sampler(space, 0)
    pruners = {
        "median": optuna.pruners.MedianPruner,
        "hyperband": optuna.pruners.HyperbandPruner,
        "none": optuna.pruners.NopPruner,
    }
    pruner = build("pruner", settings.pruner, pruners, space)
    with storage_errors(url, RuntimeError):  # of Optuna: another version has written it
        study = optuna.create_study(
            storage=url, study_name=name, direction=settings.direction, pruner=pruner, load_if_exists=True
        )
        for values in space.combinations():
            study.enqueue_trial(values, skip_if_exists=True)
    return study


def build_sampler(space: Space, number: int) -> Any:
    """The sampler of trial `number`, seeded by the search's seed and that number.

    A new sampler for each trial makes a resumed search draw the same values: all that samplers know is in the study.
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
    started = sum(trial.state.name != "WAITING" for trial in trials)
    if started >= (len(space.combinations()) or space.settings.trials):
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
    found = []
    for trial in running:
        if trial.user_attrs.get(HOST) != gethostname():
            continue
        if trial.params.keys() == space.distributions.keys():
            # `_trial_id`: Optuna has no public way to continue a trial of another process.
            found.append(optuna.trial.Trial(study, trial._trial_id))
        else:  # killed while the values were drawn
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return found


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
        reason = str(problem.__cause__ or problem).partition("\n")[0]
        raise ResourceError(
            f"the study {url} cannot be read or written: {reason}. Free disk space or repair it, then give the same"
            " command again; or start a new search: --new."
        ) from problem
