"""The first gate: does every key exist, and is every value of its type? What pydantic finds, in plain words and with
lines."""

import math
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from cpt.plugins import closest, did_you_mean, simplified
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, keys_of_config
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, OTHER_WORDS, new_home
from cpt.recipe.schema import Component, Recipe, Schedule
from cpt.recipe.sections import (
    all_keys,
    annotation_at,
    child_annotation,
    is_free_mapping,
    item_in,
    keys_of,
    section_in,
    types_in,
    without_none,
)
from cpt.recipe.tree import Location, Mistakes, Node, dotted, is_broken, place_of, plain
from cpt.recipe.words import expected, in_words, in_yaml
from cpt.recipe.written_numbers import OF_ANY_FUNCTION, OPTIONS

COMPARISONS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def check_shape(root: Node, plain_recipe: Mapping[str, Any], mistakes: Mistakes) -> tuple[Recipe | None, set[str]]:
    """The recipe if its shape is right, else None; and the top-level keys that something is wrong with."""
    try:
        return Recipe.model_validate(plain_recipe), set()
    except ValidationError as found:
        problems = found.errors(include_url=False)
    for location, text in sentences(problems):
        if not is_broken(root, location):
            mistakes.add(place_of(root, location), text)
    return None, {str(problem["loc"][0]) for problem in problems}


def read_option_numbers(node: Node, mistakes: Mistakes, annotation: Any = Recipe, location: Location = ()) -> None:
    """Read the units of numbers in options (`schedule: {warmup_tokens: 20M}`), and check their bounds.

    Options stand beside a name, and the schema does not list them.
    """
    if isinstance(node.value, list):
        for index, child in enumerate(node.value):
            read_option_numbers(child, mistakes, item_in(annotation), (*location, index))
    section = section_in(annotation) or next((part for part in map(section_in, get_args(annotation)) if part), None)
    if section is None or not isinstance(node.value, dict):
        return
    name = node.value["name"].value if "name" in node.value else None
    is_own = isinstance(name, str) and ":" in name
    for key, child in node.value.items():
        here = (*location, key)
        if not issubclass(section, Component) or key in keys_of(section):
            read_option_numbers(child, mistakes, child_annotation(annotation, key), here)
        elif section is Schedule and key == "schedule":  # of `continued`: the schedule of the run before
            read_option_numbers(child, mistakes, Schedule, here)
        elif child.value is not None and not child.broken:
            bounds = None if is_own or not location else OPTIONS.get(str(location[-1]), {}).get(key)
            read_option(
                child,
                here,
                bounds or next((kind for end, kind in OF_ANY_FUNCTION.items() if key.endswith(end)), Any),
                mistakes,
            )


def read_option(node: Node, location: Location, annotation: Any, mistakes: Mistakes) -> None:
    """Replace a text with a unit by its number; note what is out of bounds."""
    adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))
    try:
        value = adapter.validate_python(plain(node))
    except ValidationError as found:
        for problem in found.errors(include_url=False):
            mistakes.add(node.place, f"`{dotted((*location, *problem['loc']))}`: {wrong_value(problem, annotation)}")
        return
    if isinstance(node.value, str):
        node.value = value
    if isinstance(value, float) and not math.isfinite(value):
        mistakes.add(node.place, f"`{dotted(location)}`: must be a finite number, got {in_yaml(value)}")


def sentences(problems: Iterable[ErrorDetails]) -> Iterator[tuple[Location, str]]:
    """What is wrong, and where; of a key that takes several types, pydantic reports a problem for each of them."""
    by_key: dict[Location, list[tuple[Location, ErrorDetails]]] = {}
    for problem in problems:
        location, key_of_several = without_labels(problem["loc"])
        if key_of_several is None:
            yield location, sentence(problem, location)
        else:
            by_key.setdefault(key_of_several, []).append((location, problem))
    for key, found in by_key.items():
        inside = [one for one in found if one[0] != key] or [
            one for one in found if one[1]["type"] in {*COMPARISONS, "value_error"}
        ]
        for location, problem in inside:
            yield location, sentence(problem, location)
        if not inside:
            kinds, got = kinds_of(annotation_at(key)), found[0][1]["input"]
            words = [word for _, problem in found for word in words_of(problem)] + ["true", "false"] * (
                "bool" in kinds
            )
            yield key, f"`{dotted(key)}`: {expected(kinds, got) if words == [] else one_of(words, got)}"


def without_labels(steps: Location) -> tuple[Location, Location | None]:
    """A location of pydantic's without its names for types, which are no keys; and the key of several types that it
    goes through."""
    location: Location = ()
    key_of_several = None
    for step in steps:
        if key_of_several is None and len(types_in(annotation_at(location))) > 1:
            key_of_several = location
        elif step != "[key]":  # pydantic's word for a key of a mapping
            location = (*location, step)
    return location, key_of_several


def sentence(problem: ErrorDetails, location: Location) -> str:
    if problem["type"] == "extra_forbidden":
        return unknown_key(location)
    if problem["type"] == "missing":
        return missing_key(location)
    return f"`{dotted(location)}`: {wrong_value(problem, annotation_at(location))}"


def unknown_key(location: Location) -> str:
    """`modle` is not a recipe key. Did you mean `model`?"""
    *above, key = location
    name = str(key)
    section = section_in(annotation_at(tuple(above)))
    beside = list(keys_of(section)) if section else []
    where = f"a key of `{dotted(above)}`" if above else "a recipe key"
    return f"`{dotted(location)}` is not {where}.{suggestion(name, beside, tuple(above))}"


def suggestion(name: str, beside: list[str], above: Location) -> str:
    """The key that was meant: a slip of one beside it, else one of that very name elsewhere, else one much like it."""
    if simplified(name) in beside:
        return did_you_mean(name, beside)
    if name in MOVED or name in OTHER_WORDS:
        return f" Write it as {new_home(name)}."
    near = closest(name, beside)
    if near is None or SequenceMatcher(None, name, near).ratio() < 0.85:
        elsewhere = [key for key in all_keys() if key[-1] == name and key[:-1] != above]
        inside = [key for key in elsewhere if key[: len(above)] == above]
        if elsewhere:
            return f" There is {' and '.join(f'`{dotted(key)}`' for key in inside or elsewhere)}."
        if name in NO_EFFECT:
            return f" It would have no effect: {NO_EFFECT[name]}."
        if name in keys_of_config(STAGE_CONFIGS["cpt"]):
            return f" It is Hugging Face's: write it as `training.{name}`."
    return f" Did you mean `{near}`?" if near else f" There {'are' if len(beside) > 1 else 'is'}: {', '.join(beside)}."


def missing_key(location: Location) -> str:
    """`data.sources` is missing, and what it is for."""
    section = section_in(annotation_at(location[:-1]))
    field = keys_of(section).get(str(location[-1])) if section else None
    inner = section_in(field.annotation) if field else None
    purpose = (field.description if field else None) or (inner.__doc__ if inner else None)
    return f"`{dotted(location)}` is missing.{f' {purpose}' if purpose else ''}"


def wrong_value(problem: ErrorDetails, annotation: Any) -> str:
    kind, got, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind in COMPARISONS:
        return f"must be {COMPARISONS[kind].format(**context)}, got {in_yaml(got)}"
    if kind == "value_error":
        return f"{context['error']}, got {in_words(got)}"
    if kind == "finite_number":
        return f"must be a finite number, got {in_yaml(got)}"
    if kind == "literal_error":
        return one_of(words_of(problem), got)
    if kind == "string_pattern_mismatch":
        return f"may hold letters, digits, `.`, `_` and `-`, and begins with a letter or digit; got {in_words(got)}"
    if kind == "too_short":
        return "must not be empty"
    return expected(kinds_of(annotation), got)


def words_of(problem: ErrorDetails) -> list[str]:
    """The words that the key takes; none where it takes something else."""
    listed = problem["ctx"]["expected"] if problem["type"] == "literal_error" else ""
    return listed.replace("'", "").replace(" or ", ", ").split(", ") if listed else []


def one_of(choices: Iterable[str], got: object) -> str:
    """expected one of auto, float32; got the text "flaot32". Did you mean `float32`?"""
    choices = list(choices)
    hint = did_you_mean(got, choices) if isinstance(got, str) else ""
    return f"expected one of {', '.join(choices)}; got {in_words(got)}.{hint}".removesuffix(".")


def kinds_of(annotation: Any) -> list[str]:
    """The kinds of `words.KINDS` that an annotation of the schema allows."""
    if len(types := types_in(annotation)) > 1:
        return [kind for one in types for kind in kinds_of(one)]
    if section_in(annotation) or is_free_mapping(annotation):
        return ["dict"]
    if item_in(annotation) is not None:
        return ["list"]
    inner = without_none(annotation)
    return [inner.__name__] if inner in (bool, int, float, str) else ["str"]
