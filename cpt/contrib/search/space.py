"""The values to search, SPACE.yaml, and the trials so far, in Optuna's study."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from socket import gethostname
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError

from cpt.errors import RecipeError, ResourceError, install_line
from cpt.hf_internals import trial_id
from cpt.plugins import did_you_mean, find
from cpt.recipe.keys import annotation_at, without_none
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Component, Recipe, Section
from cpt.recipe.tree import (
    FilePosition,
    Mistakes,
    Node,
    plain,
    position_of,
    read_or_raise,
    steps_of,
)
from cpt.recipe.values import Positive, in_words, in_yaml, whole_number

SEARCH = "search"
GRID = "grid"
SET_BY_SEARCH = ("name", "output_dir")
OF_A_RANGE = ("low", "high", "log", "step")
EXAMPLE = "{low: 1e-6, high: 1e-3, log: true}"

Named = Annotated[
    Component, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)
]
"""`sampler: tpe` is short for `sampler: {name: tpe}`."""


class Settings(Section):
    """The `search:` section."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the search, in the folder output_dir/name; by default the recipe's name and `-search`."""
    metric: str
    """A metric of metrics.jsonl; its last value counts: `eval_<held-out set>_bits_per_byte`, `loss`, ..."""
    direction: Literal["minimize", "maximize"] = "minimize"
    trials: Positive = 20
    """Number of trials, including pruned and failed ones."""
    sampler: Named = Component(name="tpe")
    """tpe, random, grid (all combinations of lists), or a class such as `optuna.samplers:CmaEsSampler`."""
    pruner: Named = Component(name="median")
    """median, hyperband, none, or a class such as `optuna.pruners:PatientPruner`. A step is a token."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the sampler. The runs use the recipe's seed."""
    keep: Literal["all", "best"] = "all"
    """best: only the best trial keeps its checkpoints and model; all trials keep their metrics."""


@dataclass(frozen=True)
class Axis:
    """A key of the recipe with Optuna's distribution of its values. Choices are YAML text."""

    key: str
    position: FilePosition
    distribution: Any

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values to check before the search: if both ends of a range are valid, so are those between."""
        if self.is_list:
            return tuple(self.distribution.choices)
        return (self.distribution.low, self.distribution.high)

    @property
    def is_list(self) -> bool:
        return type(self.distribution).__name__ == "CategoricalDistribution"


@dataclass(frozen=True)
class Space:
    settings: Settings
    position: FilePosition
    axes: tuple[Axis, ...]

    @property
    def distributions(self) -> dict[str, Any]:
        return {axis.key: axis.distribution for axis in self.axes}

    def combinations(self) -> list[dict[str, Any]]:
        """The trials of `sampler: grid`; empty for other samplers."""
        if self.settings.sampler.name != GRID:
            return []
        combinations = []
        for values in product(*(a.ends for a in self.axes)):
            combinations.append(dict(zip(self.distributions, values, strict=True)))
        return combinations[: self.settings.trials]


def import_optuna() -> Any:
    """Import Optuna and disable its log; ResourceError if it is not installed."""
    try:
        import optuna
    except ImportError as problem:
        raise ResourceError(
            f"`cpt search` needs Optuna. Install it: {install_line('search')}"
        ) from problem
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def load_space(path: Path) -> Space:
    """Read the file; RecipeError lists all mistakes. `recipes_at_ends` checks its values against a recipe."""
    mistakes = Mistakes()
    root = read_or_raise(path, mistakes)
    entries: dict[str, Node] = root.value
    section = entries.get(SEARCH, Node({}, root.position))
    settings: Settings | None = None
    try:
        settings = Settings.model_validate(plain(section))
    except ValidationError as refused:
        for problem in refused.errors(include_url=False):
            name = ".".join(map(str, problem["loc"]))
            if problem["type"] == "extra_forbidden":
                hint = did_you_mean(name, Settings.model_fields)
            else:
                hint = ""
            mistakes.add(
                position_of(section, problem["loc"]), f"`search.{name}`: {problem['msg']}.{hint}"
            )
    axes = []
    for key, node in entries.items():
        if key != SEARCH:
            try:
                axes.append(Axis(key, node.position, distribution_of(key, plain(node))))
            except (ValueError, TypeError) as reason:
                mistakes.add(node.position, f"`{key}`: {reason}")
    if entries.keys() <= {SEARCH}:
        mistakes.add(
            root.position,
            f"no key to search: add one, such as `optimizer.learning_rate: {EXAMPLE}`",
        )
    for axis, above in permutations(axes, 2):
        if steps_of(axis.key)[: len(steps_of(above.key))] == steps_of(above.key):
            mistakes.add(
                axis.position,
                f"`{axis.key}` is part of `{above.key}` (line {above.position.line}): remove one",
            )
    for axis in axes:
        if settings is not None and settings.sampler.name == GRID and not axis.is_list:
            mistakes.add(axis.position, f"`{axis.key}`: `sampler: grid` needs a list of values")
    mistakes.raise_if_any()
    assert settings is not None, "settings without mistakes were read"
    return Space(settings, section.position, tuple(axes))


def distribution_of(key: str, value: Any) -> Any:
    """Return Optuna's distribution of a list or a range, of integers if the recipe's key or all numbers are;
    ValueError or TypeError if it is neither."""
    distributions = import_optuna().distributions
    if steps_of(key)[0] in SET_BY_SEARCH:
        raise ValueError("each trial sets it")
    if isinstance(value, list):
        return distributions.CategoricalDistribution(list(map(in_yaml, value)))
    if not isinstance(value, dict) or not {"low", "high"} <= value.keys():
        raise ValueError(
            f"expected a range such as {EXAMPLE}, or a list of values, got {in_words(value)}"
        )
    for name in value.keys() - OF_A_RANGE:
        raise ValueError(f"unknown key `{name}` of a range.{did_you_mean(name, OF_A_RANGE)}")
    numbers = {name: whole_number(number) for name, number in value.items() if name != "log"}
    annotation = without_none(annotation_at(steps_of(key)))
    # `{low: 0, high: 1}` for a key with any number, such as a weight, includes the numbers between.
    is_whole = (
        annotation is int
        or annotation is not float
        and all(isinstance(value[name], int) for name in numbers)
    )
    kind = distributions.IntDistribution if is_whole else distributions.FloatDistribution
    return kind(**numbers, log=bool(value.get("log", False)))


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    overrides = []
    for key, value in values.items():
        rounded = float(f"{value:.6g}") if isinstance(value, float) else value
        overrides.append(f"{key}={rounded}")
    return overrides


def recipes_at_ends(space: Space, recipe: Path, overrides: Sequence[str] = ()) -> dict[str, Recipe]:
    """Load the recipe with each value of a list and each end of a range; RecipeError lists all invalid ones."""
    recipes = {}
    wrong = []
    for axis in space.axes:
        for value in axis.ends:
            (override,) = overrides_of({axis.key: value})
            try:
                recipes[override] = load_recipe(recipe, [*overrides, override])
            except RecipeError as problem:
                lines = str(problem).replace("on the command line: ", "").splitlines()
                wrong += [f"{axis.position}: {line}" for line in lines]
    if wrong:
        raise RecipeError("\n".join(wrong))
    return recipes


# attributes of a trial: its machine; reason of failure
HOST = "host"
REASON = "reason"


def open_study(url: str, name: str, space: Space) -> Any:
    """Open the study with its trials; a new grid's trials are enqueued. ResourceError if the storage is unusable."""
    optuna = import_optuna()
    settings = space.settings
    build_sampler(space, 0)
    kinds = optuna.pruners
    pruners = {
        "median": kinds.MedianPruner,
        "hyperband": kinds.HyperbandPruner,
        "none": kinds.NopPruner,
    }
    pruner = build("pruner", settings.pruner, pruners, space)
    with storage_errors(url, RuntimeError):  # from Optuna: another version has written it
        study = optuna.create_study(
            storage=url,
            study_name=name,
            direction=settings.direction,
            pruner=pruner,
            load_if_exists=True,
        )
        for values in space.combinations():
            study.enqueue_trial(values, skip_if_exists=True)
    return study


def build_sampler(space: Space, number: int) -> Any:
    """Build the sampler of trial `number`. A new one per trial, seeded by the search's seed and that number, lets a
    resumed search sample the same values: samplers' only other state is the study."""
    samplers = import_optuna().samplers
    seed = int(np.random.SeedSequence([space.settings.seed, number]).generate_state(1)[0])
    accepted_options = {
        "tpe": samplers.TPESampler,
        "random": samplers.RandomSampler,
        GRID: samplers.RandomSampler,
    }
    return build("sampler", space.settings.sampler, accepted_options, space, seed=seed)


def build(
    kind: str,
    section: Component,
    components: Mapping[str, Callable[..., Any]],
    space: Space,
    **arguments: Any,
) -> Any:
    try:
        return find(kind, section.name, components)(**arguments, **section.options)
    except (TypeError, ValueError, RecipeError) as problem:
        raise RecipeError(f"{space.position}: `search.{kind}`: {problem}") from problem


def ask(study: Any, space: Space) -> Any:
    """Return the next trial with sampled values; None if all are started."""
    trials = study.get_trials(deepcopy=False)
    started = sum(trial.state.name != "WAITING" for trial in trials)
    if started >= (len(space.combinations()) or space.settings.trials):
        return None
    study.sampler = build_sampler(space, started)
    try:
        trial = study.ask(space.distributions)
    except ValueError as problem:  # a list of values has changed
        message = f"the space does not fit the trials so far: {problem} Start a new search: --new."
        raise RecipeError(message) from problem
    trial.set_user_attr(HOST, gethostname())
    return trial


def unfinished(study: Any) -> list[Any]:
    """Return unfinished trials of an earlier search on this machine, to continue with the same values."""
    kinds = import_optuna().trial
    running = study.get_trials(deepcopy=False, states=(kinds.TrialState.RUNNING,))
    trials_of_host = [trial for trial in running if trial.user_attrs.get(HOST) == gethostname()]
    return [kinds.Trial(study, trial_id(trial)) for trial in trials_of_host]


@contextmanager
def storage_errors(url: str, *further: type[Exception]) -> Iterator[None]:
    import sqlalchemy.exc

    try:
        yield
    except (
        import_optuna().exceptions.StorageInternalError,
        sqlalchemy.exc.SQLAlchemyError,
        *further,
    ) as problem:
        reason = str(problem.__cause__ or problem).partition("\n")[0]
        raise ResourceError(
            f"the study {url} is unusable: {reason}. Repair it, or use --new."
        ) from problem
