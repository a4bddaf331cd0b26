"""SPACE.yaml: which keys of a recipe a search tries, with which values, and how; mistakes come with file and line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from cpt.errors import RecipeError, ResourceError
from cpt.plugins import did_you_mean
from cpt.recipe.keys import annotation_at
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Component, Recipe, Section
from cpt.recipe.shape import kinds_of
from cpt.recipe.tree import Mistakes, Node, Place, UnreadableError, place_of, plain, read_yaml, steps_of
from cpt.recipe.values import Positive, in_words, in_yaml, whole_number

SEARCH, GRID = "search", "grid"
SET_BY_SEARCH = ("name", "output_dir")
OF_A_RANGE = ("low", "high", "log", "step")
EXAMPLE = "{low: 1e-6, high: 1e-3, log: true}"

Named = Annotated[Component, BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value)]
"""`sampler: tpe` is short for `sampler: {name: tpe}`."""


class Settings(Section):
    """The `search:` section."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The search's folder is output_dir/name; by default the recipe's name and `-search`."""
    metric: str
    """A figure of metrics.jsonl, its last value: `eval_<held-out set>_bits_per_byte`, `loss`, ..."""
    direction: Literal["minimize", "maximize"] = "minimize"
    trials: Positive = 20
    """Pruned and failed ones included."""
    sampler: Named = Component(name="tpe")
    """tpe, random, grid (all combinations of lists), or a class such as `optuna.samplers:CmaEsSampler`."""
    pruner: Named = Component(name="median")
    """median, hyperband, none, or a class such as `optuna.pruners:PatientPruner`. A step is a token."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the sampler. The runs use the recipe's seed."""
    keep: Literal["all", "best"] = "all"
    """best: only the best trial keeps its checkpoints and its model; all keep their metrics."""


@dataclass(frozen=True)
class Axis:
    """A key of the recipe with Optuna's distribution of its values. Choices are YAML text, as on the command line:
    they may be whole sections, which Optuna does not know."""

    key: str
    place: Place
    distribution: Any

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values to check before the search: where both ends of a range pass, those between do too."""
        return tuple(self.distribution.choices) if self.is_list else (self.distribution.low, self.distribution.high)

    @property
    def is_list(self) -> bool:
        return type(self.distribution).__name__ == "CategoricalDistribution"


@dataclass(frozen=True)
class Space:
    settings: Settings
    place: Place
    axes: tuple[Axis, ...]

    @property
    def distributions(self) -> dict[str, Any]:
        return {axis.key: axis.distribution for axis in self.axes}

    def combinations(self) -> list[dict[str, Any]]:
        """The trials of `sampler: grid`; none with another sampler."""
        if self.settings.sampler.name != GRID:
            return []
        found = [dict(zip(self.distributions, one, strict=True)) for one in product(*(a.ends for a in self.axes))]
        return found[: self.settings.trials]


def import_optuna() -> Any:
    """Optuna, silent unless something is wrong.

    Raises:
        ResourceError: it is not installed.
    """
    try:
        import optuna
    except ImportError as problem:
        raise ResourceError("`cpt search` needs Optuna. Install it: pip install 'cpt[search]'") from problem
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def load_space(path: Path) -> Space:
    """Read the file; whether its values fit a recipe is for `recipes_at_ends`.

    Raises:
        RecipeError: all mistakes, one per line.
    """
    mistakes = Mistakes()
    try:
        root = read_yaml(path, mistakes)
    except UnreadableError:
        mistakes.raise_if_any()
        raise
    entries: dict[str, Node] = root.value
    section = entries.get(SEARCH, Node({}, root.place))
    settings = read_settings(section, mistakes)
    found = [read_axis(key, node, mistakes) for key, node in entries.items() if key != SEARCH]
    axes = tuple(axis for axis in found if axis is not None)
    if not found:
        mistakes.add(root.place, f"no key of the recipe to search, such as `optimizer.learning_rate: {EXAMPLE}`")
    for axis, above in permutations(axes, 2):
        if steps_of(axis.key)[: len(steps_of(above.key))] == steps_of(above.key):
            mistakes.add(axis.place, f"`{axis.key}` is part of `{above.key}` (line {above.place.line}): keep one")
    for axis in axes if settings is not None and settings.sampler.name == GRID else ():
        if not axis.is_list:
            mistakes.add(axis.place, f"`{axis.key}`: `sampler: grid` needs a list of values")
    mistakes.raise_if_any()
    assert settings is not None, "settings without mistakes were read"
    return Space(settings, section.place, axes)


def read_settings(node: Node, mistakes: Mistakes) -> Settings | None:
    """The `search:` section; None after a mistake."""
    try:
        return Settings.model_validate(plain(node))
    except ValidationError as found:
        for problem in found.errors(include_url=False):
            name = ".".join(map(str, problem["loc"]))
            hint = did_you_mean(name, Settings.model_fields) if problem["type"] == "extra_forbidden" else ""
            mistakes.add(place_of(node, problem["loc"]), f"`search.{name}`: {problem['msg']}.{hint}")
        return None


def read_axis(key: str, node: Node, mistakes: Mistakes) -> Axis | None:
    """A range or a list of values; None after a mistake."""
    distributions, value = import_optuna().distributions, plain(node)
    try:
        if steps_of(key)[0] in SET_BY_SEARCH:
            raise ValueError("the search sets it for each trial")
        if isinstance(value, list):
            distribution = distributions.CategoricalDistribution([in_yaml(one) for one in value])
        else:
            distribution = range_of(key, value, distributions)
    except (ValueError, TypeError) as problem:
        mistakes.add(node.place, f"`{key}`: {problem}")
        return None
    return Axis(key, node.place, distribution)


def range_of(key: str, value: Any, distributions: Any) -> Any:
    """Optuna's distribution of a range: of whole numbers if the recipe says so, or if all numbers are whole.

    Raises:
        ValueError: it is not a range.
    """
    if not isinstance(value, dict) or not {"low", "high"} <= value.keys():
        raise ValueError(f"expected a range such as {EXAMPLE}, or a list of values, got {in_words(value)}")
    for name in value.keys() - OF_A_RANGE:
        raise ValueError(f"a range has no `{name}`.{did_you_mean(name, OF_A_RANGE)}")
    numbers = {name: whole_number(number) for name, number in value.items() if name != "log"}
    kinds = kinds_of(annotation_at(steps_of(key)))
    # `{low: 0, high: 1}` of a key that takes any number, such as a weight, means the numbers between, too.
    is_whole = kinds == ["int"] or kinds != ["float"] and all(isinstance(value[name], int) for name in numbers)
    kind = distributions.IntDistribution if is_whole else distributions.FloatDistribution
    return kind(**numbers, log=bool(value.get("log", False)))


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    return [f"{key}={float(f'{one:.6g}') if isinstance(one, float) else one}" for key, one in values.items()]


def recipes_at_ends(space: Space, recipe: Path, overrides: Sequence[str] = ()) -> dict[str, Recipe]:
    """Load the recipe with each single value of a list and each end of a range.

    Raises:
        RecipeError: all values that the recipe cannot have.
    """
    found, wrong = {}, []
    for axis in space.axes:
        for value in axis.ends:
            (override,) = overrides_of({axis.key: value})
            try:
                found[override] = load_recipe(recipe, [*overrides, override])
            except RecipeError as problem:
                lines = str(problem).replace("on the command line: ", "").splitlines()
                wrong += [f"{axis.place}: {line}" for line in lines]
    if wrong:
        raise RecipeError("\n".join(wrong))
    return found
