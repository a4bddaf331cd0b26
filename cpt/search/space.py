"""SPACE.yaml: which keys of a recipe may be what, and how they are searched; each mistake is told with its line."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.recipe.load import checked
from cpt.recipe.overrides import put, steps_of
from cpt.recipe.references import resolved
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Mistakes, Node, Place, copied
from cpt.recipe.words import in_yaml
from cpt.recipe.yaml_lines import UnreadableError, read_yaml
from cpt.search.axes import Axis, read_axis
from cpt.search.settings import Settings, read_settings

SEARCH = "search"
SET_BY_SEARCH = ("name", "description", "tags", "output_dir")


@dataclass(frozen=True)
class Space:
    """What may be tried, and how."""

    file: Path
    settings: Settings
    axes: tuple[Axis, ...]
    root: Node

    def described(self) -> dict[str, Any]:
        """The values that may be tried, as the search's record keeps them."""
        return {axis.key: axis.described() for axis in self.axes}

    @property
    def num_trials(self) -> int:
        """How many there will be; of a grid no more than it has points."""
        if self.settings.sampler.name != "grid":
            return self.settings.trials
        return min(self.settings.trials, math.prod(len(values) for values in (self.grid() or {}).values()))

    def grid(self) -> dict[str, list[Any]] | None:
        """All values of each key as Optuna sees them; None where a range has no step."""
        found = {axis.key: axis.grid for axis in self.axes}
        return None if None in found.values() else {key: values or [] for key, values in found.items()}


def load_space(path: Path) -> Space:
    """Read the file by itself; whether its values fit a recipe is asked by `recipes_at_ends`.

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
    settings = read_settings(entries.get(SEARCH), root, mistakes)
    found = {key: read_axis(key, node, mistakes) for key, node in entries.items() if key != SEARCH}
    axes = [axis for axis in found.values() if axis is not None]
    if not found:
        mistakes.add(
            root.place, "no key of the recipe to search: `optimizer.learning_rate: {low: 1e-6, high: 1e-3, log: true}`"
        )
    for number, axis in enumerate(axes):
        if axis.key.partition("[")[0].partition(".")[0] in SET_BY_SEARCH:
            mistakes.add(axis.place, f"`{axis.key}` is set by the search for each trial: take it out")
        for other in axes[:number]:
            if is_below(axis.key, other.key) or is_below(other.key, axis.key):
                mistakes.add(
                    axis.place,
                    f"`{axis.key}` and `{other.key}` (line {other.place.line}) are in each other's way: keep one",
                )
    mistakes.raise_if_any()
    assert settings is not None, "settings without mistakes are there"
    return Space(path, settings, tuple(axes), root)


def is_below(key: str, other: str) -> bool:
    """Whether `key` is the other one, or stands below it."""
    steps, above = steps_of(key), steps_of(other)
    return steps[: len(above)] == above


def recipe_with(root: Node, values: Mapping[str, Any], place: Place) -> Recipe:
    """The recipe with these values in their places.

    Args:
        root: its tree, of `load_with_places`.
        values: by key, `data.sources[0].weight`.
        place: where mistakes in the values are shown.

    Raises:
        RecipeError: they do not pass the gates of shape and sense.
    """
    mistakes, tree = Mistakes(), copied(root)
    for key, value in values.items():
        put(tree, steps_of(key), node_of(value, place), mistakes)
        tree = resolved(tree, Recipe, mistakes, trail=())
    mistakes.raise_if_any()
    return checked(tree, mistakes)


def node_of(value: Any, place: Place) -> Node:
    """A plain value as a tree."""
    if isinstance(value, dict):
        return Node({key: node_of(child, place) for key, child in value.items()}, place)
    if isinstance(value, list):
        return Node([node_of(child, place) for child in value], place)
    return Node(value, place)


def single_values(space: Space) -> Iterator[tuple[Axis, Any]]:
    """Each value that the gates look at: the ends of ranges and all choices, one at a time on top of the recipe."""
    for axis in space.axes:
        for value in axis.ends:
            yield axis, value


def recipes_at_ends(space: Space, root: Node) -> dict[str, tuple[Axis, Recipe]]:
    """The recipe with each such value: what is tried -> its key and recipe.

    Raises:
        RecipeError: every value that does not pass the gates of shape and sense, with the space's line.
    """
    found, wrong = {}, []
    for axis, value in single_values(space):
        told = f"{axis.key} = {in_yaml(value)}"
        try:
            found[told] = (axis, recipe_with(root, {axis.key: value}, axis.place))
        except RecipeError as problem:
            lines = [line.removeprefix(f"{axis.place}: ") for line in str(problem).splitlines()]
            wrong += [f"{axis.place}: with {told}: {line}" for line in lines]
    if wrong:
        raise RecipeError("\n".join(dict.fromkeys(wrong)))
    return found
