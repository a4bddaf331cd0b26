"""The first gate: does every key exist, and is every value of its type? What pydantic finds, in plain words and with lines."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from cpt.extend import closest, did_you_mean, simplified, slips
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, keys_of_config
from cpt.recipe.moved_keys import MOVED, new_home
from cpt.recipe.schema import Recipe
from cpt.recipe.sections import all_keys, annotation_at, is_free_mapping, item_in, keys_of, section_in, without_none
from cpt.recipe.tree import Location, Mistakes, Node, dotted, is_broken, place_of
from cpt.recipe.words import expected, in_words, in_yaml


def check_shape(root: Node, plain_recipe: Mapping[str, Any], mistakes: Mistakes) -> tuple[Recipe | None, set[str]]:
    """The recipe if its shape is right, else None; and the top-level keys that something is wrong with."""
    try:
        return Recipe.model_validate(plain_recipe), set()
    except ValidationError as found:
        problems = found.errors(include_url=False)
    for problem in problems:
        location = tuple(step for step in problem["loc"] if step != "[key]")  # pydantic's word for a key of a mapping
        if not is_broken(root, location):
            mistakes.add(place_of(root, location), sentence(problem, location))
    return None, {str(problem["loc"][0]) for problem in problems}


def sentence(problem: ErrorDetails, location: Location) -> str:
    """What is wrong, in one sentence."""
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
    if name in MOVED:
        return f" Write it as {new_home(name)}."
    near = closest(name, beside)
    if near is None or slips(name, near) > 1:
        elsewhere = [f"`{dotted(key)}`" for key in all_keys() if key[-1] == name and key[:-1] != above]
        if elsewhere:
            return f" There is {' and '.join(elsewhere)}."
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
    """Why the value cannot stand there."""
    kind, got, context = problem["type"], problem["input"], problem.get("ctx", {})
    comparisons = {
        "greater_than": "more than {gt}",
        "greater_than_equal": "at least {ge}",
        "less_than": "less than {lt}",
        "less_than_equal": "at most {le}",
    }
    if kind in comparisons:
        return f"must be {comparisons[kind].format(**context)}, got {in_yaml(got)}"
    if kind == "value_error":
        return f"{context['error']}, got {in_words(got)}"
    if kind == "finite_number":
        return f"must be a finite number, got {in_yaml(got)}"
    if kind == "literal_error":
        return one_of(context["expected"].replace("'", "").replace(" or ", ", ").split(", "), got)
    if kind == "string_pattern_mismatch":
        return f"may hold letters, digits, `.`, `_` and `-`, and begins with a letter or digit; got {in_words(got)}"
    if kind == "too_short":
        return "must not be empty"
    return expected(kinds_of(annotation), got)


def one_of(choices: Iterable[str], got: object) -> str:
    """expected one of auto, float32; got the text "flaot32". Did you mean `float32`?"""
    choices = list(choices)
    hint = did_you_mean(got, choices) if isinstance(got, str) else ""
    return f"expected one of {', '.join(choices)}; got {in_words(got)}.{hint}".removesuffix(".")


def kinds_of(annotation: Any) -> list[str]:
    """The kinds of `words.KINDS` that an annotation of the schema allows."""
    if section_in(annotation) or is_free_mapping(annotation):
        return ["dict"]
    if item_in(annotation) is not None:
        return ["list"]
    inner = without_none(annotation)
    return [inner.__name__] if inner in (bool, int, float, str) else ["str"]
