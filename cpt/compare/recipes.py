"""Which keys of the recipes differ, and exactly those."""

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError
from xxhash import xxh3_64_hexdigest

from cpt.compare.record import Record
from cpt.compare.rows import Row, Topic
from cpt.recipe.difference import UNSET
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Location
from cpt.recipe.words import in_yaml
from cpt.recipe.yaml_lines import resolve_scalar
from cpt.runs.folder import Content

ASIDE = ("name", "output_dir")  # which run it is, not what it does
LONGEST = 100

KeyDifference = tuple[Location, list[Any]]
"""The way to a key, and its value in each recipe."""


def recipe_topic(records: Sequence[Record], same_anyway: set[Location], not_compared: list[str]) -> Topic:
    """A row for each key that differs; runs without a readable recipe are left out.

    Args:
        same_anyway: keys whose values mean the same: two paths to the same files.
        not_compared: takes sentences about recipes of other versions.
    """
    trees, formless = full_trees(records, not_compared)
    there = [number for number, tree in enumerate(trees) if tree]
    rows, remarks = [], []
    lacking = dict.fromkeys(formless, 0)
    for location, values in differing_keys([trees[number] for number in there]):
        name = dotted(location)
        if location in same_anyway:
            remarks.append(f"{name} is written in other ways, but the files are the same.")
            continue
        cells: list[str | None] = [None] * len(records)
        for number, value in zip(there, values, strict=True):
            if value is UNSET and number in formless:
                lacking[number] += 1
            else:
                cells[number] = told(value)
        row = Row(name, tuple(cells))
        rows += [row] if row.differs else []
    for number, count in lacking.items():
        not_compared.append(
            f"{count} keys of the recipe that {records[number].name} lacks: its recipe.yaml is cut off, of another"
            " version, or was changed by hand; the others are compared as they are written."
        )
    return Topic("Recipe", tuple(rows), tuple(remarks))


def full_trees(records: Sequence[Record], not_compared: list[str]) -> tuple[list[Content], list[int]]:
    """Each recipe with this version's defaults for keys that it does not have; and which ones have lost their form and
    stay as written."""
    filled, formless = list[Content](), []
    for number, record in enumerate(records):
        tree, unknown = with_defaults(record.recipe) if record.recipe else ({}, [])
        if tree is None:
            formless.append(number)
        elif unknown:
            keys = ", ".join(f"`{dotted(location)}`" for location in unknown)
            not_compared.append(
                f"what {keys} of {record.name} means: its recipe is of another version; such keys are compared as"
                " written."
            )
        filled.append(record.recipe if tree is None else tree)
    return filled, formless


def with_defaults(tree: Content) -> tuple[Content | None, list[Location]]:
    """The recipe in full, and its keys that this version does not know; None where it has not the form of a recipe."""
    unknown: list[Location] = []
    stripped = copied(tree)
    for _ in range(2):
        try:
            return (
                restored(Recipe.model_validate(stripped).model_dump(mode="json", by_alias=True), tree, unknown),
                unknown,
            )
        except ValidationError as found:
            problems = found.errors(include_url=False)
        if any(problem["type"] != "extra_forbidden" for problem in problems):
            return None, []
        unknown = [problem["loc"] for problem in problems]
        try:
            for location in unknown:
                del at(stripped, location[:-1])[location[-1]]
        except (KeyError, IndexError, TypeError):  # below a value that may have several forms
            break
    return None, []


def restored(full: Content, tree: Content, unknown: list[Location]) -> Content:
    """With the keys that were taken out."""
    for location in unknown:
        at(full, location[:-1])[location[-1]] = at(tree, location)
    return full


def at(tree: Any, location: Location) -> Any:
    """What stands there."""
    for step in location:
        tree = tree[step]
    return tree


def copied(tree: Any) -> Any:
    """The same again, to be changed on its own."""
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return [copied(value) for value in tree] if isinstance(tree, list) else tree


def differing_keys(trees: Sequence[Content]) -> list[KeyDifference]:
    """The deepest keys whose values are not the same in all recipes; of sources and other parts with names, by their
    names."""
    if len(trees) < 2:
        return []
    return list(differences([{key: value for key, value in tree.items() if key not in ASIDE} for tree in trees], ()))


def differences(values: list[Any], above: Location) -> Iterator[KeyDifference]:
    """Those below one key; UNSET stands for what a recipe lacks."""
    if all(isinstance(value, dict) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            yield from differences([value.get(key, UNSET) for value in values], (*above, key))
    elif all(isinstance(value, list) for value in values):
        named = [by_name(value) for value in values]
        if all(one is not None for one in named):
            yield from differences([one for one in named if one is not None], above)
            orders = [list(one) for one in named if one is not None]
            if any(order != orders[0] for order in orders) and all(set(order) == set(orders[0]) for order in orders):
                yield (*above, "order"), orders
        else:
            for index in range(max(map(len, values))):
                yield from differences(
                    [value[index] if index < len(value) else UNSET for value in values], (*above, index)
                )
    elif any(not is_same(value, values[0]) for value in values):
        yield above, values


def is_same(value: Any, other: Any) -> bool:
    """True is not 1, and 1 is 1.0."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def by_name(items: list[Any]) -> dict[str, Any] | None:
    """The items of a list by their names in brackets; None where they are not told apart by names."""
    names = [item.get("name") if isinstance(item, dict) else None for item in items]
    if not items or not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        return None
    return {f"[{name}]": item for name, item in zip(names, items, strict=True)}


def dotted(location: Location) -> str:
    """`data.sources[general].weight`."""
    steps = [
        f"[{step}]" if isinstance(step, int) else step if step.startswith("[") else f".{step}" for step in location
    ]
    return "".join(steps).removeprefix(".")


def told(value: Any) -> str:
    """As a table shows it: in one line; of a long one its beginning, and a hash of the whole."""
    if value is UNSET:
        return "not set"
    if isinstance(value, str) and (not value or is_taken_for_another(value)):
        return f"'{value}'"
    text = " ".join(in_yaml(without_defaults(value)).split())
    return (
        text
        if len(text) <= LONGEST
        else f"{text[: LONGEST - 14]}... ({xxh3_64_hexdigest(text.encode(errors='replace'))[:8]})"
    )


def is_taken_for_another(text: str) -> bool:
    """Whether it is a number or another word of YAML's when it stands without quotes."""
    try:
        return not isinstance(resolve_scalar(text), str)
    except ValueError:
        return True


def without_defaults(value: Any) -> Any:
    """Of a whole section what says something."""
    if isinstance(value, dict):
        return {key: without_defaults(child) for key, child in value.items() if child not in (None, [], {})}
    return value
