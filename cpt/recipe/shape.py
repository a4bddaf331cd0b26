"""Check that keys exist and values have the right type, the first check; also for Hugging Face's keys."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from cpt.plugins import closest, did_you_mean, fits, simplified
from cpt.recipe.huggingface_keys import (
    LORA,
    PEFT_METHODS,
    STAGE_CONFIGS,
    TAKES_QUANTIZED,
    keys_of_config,
    method_of,
)
from cpt.recipe.keys import (
    AUTO,
    AUTOMATIC,
    NOT_NEEDED,
    NOT_SUPPORTED,
    all_keys,
    annotation_at,
    child_annotation,
    format_new_key,
    item_in,
    key_of_others,
    keys_of,
    section_in,
)
from cpt.recipe.schema import LORA_PRESETS, LORA_QUANTIZATION, Component, Recipe, Schedule
from cpt.recipe.training_keys import (
    MOVED,
    NESTED,
    NO_EFFECT,
    NO_EFFECT_OF_VALUE,
    recipe_key_of,
    why_refused,
)
from cpt.recipe.tree import Location, Mistakes, Node, dotted, node_at, nodes_along, plain
from cpt.recipe.values import OF_ANY_FUNCTION, OPTIONS, StepsOrShare, expected, in_words, in_yaml

COMPARISONS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "finite_number": "a finite number",
}
KINDS = {
    "bool_type": bool,
    "int_type": int,
    "float_type": float,
    "string_type": str,
    "path_type": str,
}
KINDS |= {"list_type": list, "dict_type": dict, "model_type": dict}
"""pydantic's problem -> the expected value."""
MOST_LISTED = 30  # keys in a message


def check_shape(
    root: Node, plain_recipe: Mapping[str, Any], mistakes: Mistakes
) -> tuple[Recipe | None, set[str]]:
    """Return the recipe if its shape is right, else None; and the top-level keys with mistakes."""
    try:
        return Recipe.model_validate(plain_recipe), set()
    except ValidationError as error:
        problems = error.errors(include_url=False)
    for location, text in sentences(problems, plain_recipe):
        nodes = nodes_along(root, location)
        if not any(node.broken for node in nodes):
            mistakes.add(nodes[-1].position, text)
    return None, {str(problem["loc"][0]) for problem in problems}


def read_option_numbers(
    node: Node, mistakes: Mistakes, annotation: Any = Recipe, location: Location = ()
) -> None:
    """Read the units of numbers in options (`schedule: {warmup_tokens: 20M}`), and check their bounds.

    Options are written next to a name, and the schema does not list them.
    """
    if isinstance(node.value, list):
        for index, child in enumerate(node.value):
            read_option_numbers(child, mistakes, item_in(annotation), (*location, index))
    section = section_among(annotation)
    if section is None or not isinstance(node.value, dict):
        return
    name = node.value["name"].value if "name" in node.value else None
    is_custom = isinstance(name, str) and ":" in name
    for key, child in node.value.items():
        child_location = (*location, key)
        if not issubclass(section, Component) or key in keys_of(section):
            child_type = child_annotation(annotation, key)
            read_option_numbers(child, mistakes, child_type, child_location)
        elif section is Schedule and key == "schedule":
            # An option of `continued`: the schedule of the previous run.
            read_option_numbers(child, mistakes, Schedule, child_location)
        elif child.value is not None and not child.broken:
            option_type = type_of_option(child_location, is_custom=is_custom)
            read_option(child, child_location, option_type, mistakes)


def section_among(annotation: Any) -> type[BaseModel] | None:
    """Return the section that an annotation allows, also as one of several types."""
    for part in (annotation, *get_args(annotation)):
        section = section_in(part)
        if section is not None:
            return section
    return None


def type_of_option(location: Location, *, is_custom: bool) -> Any:
    """Return the type and bounds of a component's option; for a custom one, from its name's ending."""
    *above, key = map(str, location)
    if above and not is_custom:
        bounds = OPTIONS.get(above[-1], {}).get(key)
        if bounds is not None:
            return bounds
    for ending, option_type in OF_ANY_FUNCTION.items():
        if key.endswith(ending):
            return option_type
    return Any


def read_option(node: Node, location: Location, annotation: Any, mistakes: Mistakes) -> None:
    """Replace a text with a unit by its number; add a mistake if it is out of bounds."""
    try:
        value = strict_adapter(annotation).validate_python(plain(node))
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            key = dotted((*location, *problem["loc"]))
            mistakes.add(node.position, f"`{key}`: {wrong_value(problem)}")
        return
    if isinstance(node.value, str):
        node.value = value
    if isinstance(value, float) and not math.isfinite(value):
        text = f"must be a finite number, got {in_yaml(value)}"
        mistakes.add(node.position, f"`{dotted(location)}`: {text}")


@cache
def strict_adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(strict=True, allow_inf_nan=False))


def sentences(
    problems: Iterable[ErrorDetails], recipe: Mapping[str, Any]
) -> Iterator[tuple[Location, str]]:
    """Yield mistakes and their locations; pydantic reports a problem for each type that a key may have."""
    by_key: dict[Location, list[ErrorDetails]] = {}
    for problem in problems:
        location = location_of(problem, recipe)
        if problem["loc"][-1] == "[key]":
            yield location, sentence(problem, location)
        else:
            by_key.setdefault(location, []).append(problem)
    wrong_types = {*KINDS, "literal_error"}
    for location, problems_of_key in by_key.items():
        wrong_values = [
            problem for problem in problems_of_key if problem["type"] not in wrong_types
        ]
        for problem in wrong_values:
            yield location, sentence(problem, location)
        if not wrong_values and not has_keys_below(location, by_key):
            yield location, f"`{dotted(location)}`: {wrong_type(problems_of_key)}"


def has_keys_below(location: Location, locations: Iterable[Location]) -> bool:
    return any(other != location and other[: len(location)] == location for other in locations)


def location_of(problem: ErrorDetails, recipe: Any) -> Location:
    """Return the steps to a key without those that pydantic adds: names of types, and "[key]" for a mapping's key."""
    location: Location = ()
    for step in problem["loc"]:
        is_key = isinstance(recipe, dict) and step in recipe
        is_index = isinstance(recipe, list) and isinstance(step, int)
        if is_key or is_index:
            location = (*location, step)
            recipe = recipe[step]
    if problem["type"] == "missing":
        return (*location, problem["loc"][-1])
    return location


def sentence(problem: ErrorDetails, location: Location) -> str:
    """Describe the mistake of one key: unknown, missing, or with a wrong value."""
    *above, key = location
    section = section_in(annotation_at(tuple(above)))
    fields = keys_of(section) if section else {}
    if problem["type"] == "extra_forbidden":
        section_name = f"a key of `{dotted(above)}`" if above else "a recipe key"
        hint = suggestion(str(key), list(fields), tuple(above))
        return f"`{dotted(location)}` is not {section_name}.{hint}"
    if problem["type"] == "missing":
        field = fields[str(key)]
        inner = section_in(field.annotation)
        description = field.description or (inner and inner.__doc__) or ""
        return f"`{dotted(location)}` is missing. {description}".rstrip()
    return f"`{dotted(location)}`: {wrong_value(problem)}"


def suggestion(name: str, siblings: Collection[str], above: Location) -> str:
    """Suggest a key: a similar one in the same section, else the same name elsewhere, else a similar one elsewhere.

    Args:
        siblings: the keys that the section has.
        above: the location of the section.
    """
    if simplified(name) in siblings:
        return did_you_mean(name, siblings)
    other_key = key_of_others(name, above)
    if other_key is not None:
        return f" Write it as {format_new_key(other_key)}."
    if name in NOT_NEEDED:
        return f" Remove it: {NOT_NEEDED[name]}."
    if name in NOT_SUPPORTED:
        return f" Not supported: {NOT_SUPPORTED[name]}."
    similar = closest(name, [*siblings, *MOVED])
    if similar is None or SequenceMatcher(None, name, similar).ratio() < 0.85:
        same_name = [key for key in all_keys() if key[-1] == name and key[:-1] != above]
        if same_name:
            below = [key for key in same_name if key[: len(above)] == above]
            keys = " or ".join(f"`{dotted(key)}`" for key in below or same_name)
            return f" Use {keys}."
        if name in NO_EFFECT:
            return f" It would have no effect: {NO_EFFECT[name]}."
        if name in keys_of_config(STAGE_CONFIGS["cpt"]):
            return f" It is a Hugging Face key: write it as `training.{name}`."
    if similar in siblings:
        return f" Did you mean `{similar}`?"
    if similar is not None:
        return f" Did you mean `{similar}`? It is written as {format_new_key(similar)}."
    if len(siblings) <= MOST_LISTED:
        return f" Known keys: {', '.join(siblings)}."
    return ""


def wrong_value(problem: ErrorDetails) -> str:
    kind = problem["type"]
    got = problem["input"]
    context = problem.get("ctx", {})
    if kind in COMPARISONS:
        limits = {name: without_fraction(limit) for name, limit in context.items()}
        return f"must be {COMPARISONS[kind].format(**limits)}, got {in_yaml(got)}"
    if kind == "value_error":
        return f"{context['error']}, got {in_words(got)}"
    if kind == "string_pattern_mismatch":
        return f"must be letters, digits, `.`, `_` and `-`, starting with a letter or digit; got {in_words(got)}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    return wrong_type([problem])


def without_fraction(limit: float) -> float:
    if limit == int(limit):
        return int(limit)
    return limit


def wrong_type(problems: Sequence[ErrorDetails]) -> str:
    """Describe a value that has none of the types that the key allows."""
    got = problems[0]["input"]
    kinds: list[type] = []
    choices: list[str] = []
    for problem in problems:
        if problem["type"] in KINDS:
            kinds.append(KINDS[problem["type"]])
        elif problem["type"] == "literal_error":  # pydantic lists them: 'a', 'b' or 'c'
            listed = problem["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            choices += listed.split(", ")
    if not choices:
        return expected(kinds, got)
    if bool in kinds:
        choices += ["true", "false"]
    return one_of(choices, got)


def one_of(choices: Iterable[str], got: object) -> str:
    """expected one of auto, float32; got the text "flaot32". Did you mean `float32`?"""
    choices = list(choices)
    hint = did_you_mean(got, choices) if isinstance(got, str) else ""
    return f"expected one of {', '.join(choices)}; got {in_words(got)}.{hint}".removesuffix(".")


AT_LEAST_1 = (
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "ddp_timeout",
    "steps_per_generation",
    "num_iterations",
    "num_generations",
    "generation_batch_size",
    "max_completion_length",
    "max_new_tokens",
    "dataloader_prefetch_factor",
    "ddp_bucket_cap_mb",
    "r",
)
ABOVE_0 = ("temperature", "repetition_penalty", "half_life")
AT_LEAST_0 = (
    "max_grad_norm",
    "dataloader_num_workers",
    "beta",
    "epsilon",
    "epsilon_high",
    "neftune_noise_alpha",
    "desirable_weight",
    "undesirable_weight",
    "cpo_alpha",
    "value_coefficient",
    "value_clip",
)
BELOW_1 = ("label_smoothing_factor", "label_smoothing", "lora_dropout")
SHARES = (
    "top_p",
    "min_p",
    "gamma",
    "lam",
    "lmbda",
    "ref_model_mixup_alpha",
    "vllm_gpu_memory_utilization",
)
BOUNDS: Mapping[str, Any] = {
    **dict.fromkeys(AT_LEAST_1, Annotated[float, Field(ge=1)]),
    **dict.fromkeys(ABOVE_0, Annotated[float, Field(gt=0)]),
    **dict.fromkeys(AT_LEAST_0, Annotated[float, Field(ge=0)]),
    **dict.fromkeys(BELOW_1, Annotated[float, Field(ge=0, lt=1)]),
    **dict.fromkeys(SHARES, Annotated[float, Field(ge=0, le=1)]),
    "logging_steps": StepsOrShare,
}
"""Bounds that Hugging Face's classes do not check: other values fail later or have unexpected effects."""
LORA_IS_SET = {
    "peft_type",
    "task_type",
    "inference_mode",
    "base_model_name_or_path",
    "auto_mapping",
    "peft_version",
    "revision",
}
"""Options of peft's classes that cpt sets."""
LORA_CHOICES = {"preset": LORA_PRESETS, **LORA_QUANTIZATION}


def check_passed_on_keys(root: Node, mistakes: Mistakes) -> None:
    """Check the keys of `training:` and `model.lora`, and convert whole numbers and paths for Hugging Face."""
    training = node_at(root, ("training",))
    if training is not None and isinstance(training.value, dict):
        check_training_keys(training, root, mistakes)
    lora = node_at(root, ("model", "lora"))
    if lora is not None and isinstance(lora.value, dict):
        check_lora_keys(lora, mistakes)


def check_training_keys(training: Node, root: Node, mistakes: Mistakes) -> None:
    stage = node_at(root, ("stage",))
    stage_name = str(stage.value) if stage else "cpt"
    is_custom = "." in stage_name  # its config class checks its keys itself
    config = STAGE_CONFIGS.get(stage_name, STAGE_CONFIGS["cpt"])
    for key, node in training.value.items():
        is_automatic = node.value == AUTO and key in AUTOMATIC  # a number replaces auto later
        is_refused = refuse_key(key, node, stage_name, root, mistakes)
        if not is_refused and not is_custom and not is_automatic:
            check_key(("training", key), node, config, mistakes)


def refuse_key(key: str, node: Node, stage: str, root: Node, mistakes: Mistakes) -> bool:
    """Add a mistake, and return True, for a key that the recipe has elsewhere or that would have no effect."""
    if key in NESTED and isinstance(node.value, dict):
        refused = [
            refuse_key(f"{key}.{below}", child, stage, root, mistakes)
            for below, child in node.value.items()
        ]
        return any(refused)
    if key in NESTED and isinstance(node.value, str):
        mistakes.add(node.position, f"`training.{key}`: write the file's keys here, not its name")
        return True
    recipe_key = recipe_key_of(key, stage)
    if recipe_key is not None:
        problem: str | None = explain_moved_key(key, recipe_key, node, root)
    else:
        problem = why_refused(key, stage)
    value = plain(node)
    if problem is None and isinstance(value, str):
        reason = NO_EFFECT_OF_VALUE.get((key, value))
        if reason is not None:
            problem = f"`training.{key}: {value}` would have no effect: {reason}"
    if problem is not None:
        mistakes.add(node.position, problem)
    return problem is not None


def check_lora_keys(lora: Node, mistakes: Mistakes) -> None:
    """Check the options of the method's config class, and those that cpt adds."""
    method = method_of({key: node.value for key, node in lora.value.items() if key == "method"})
    if method not in PEFT_METHODS:
        text = f"`model.lora.method`: {one_of(PEFT_METHODS, method)}"
        mistakes.add(lora.value["method"].position, text)
        return
    for key, node in lora.value.items():
        if key in LORA_IS_SET:
            mistakes.add(node.position, f"`model.lora.{key}` is set by cpt: remove it")
        elif key in LORA_CHOICES:
            methods = (LORA,) if key == "preset" else TAKES_QUANTIZED
            if node.value not in LORA_CHOICES[key]:
                choices = map(in_yaml, LORA_CHOICES[key])
                mistakes.add(node.position, f"`model.lora.{key}`: {one_of(choices, node.value)}")
            elif method not in methods:
                text = f"`model.lora.{key}` is not for `method: {method}`: remove one of them"
                mistakes.add(node.position, text)
        elif key != "method":
            check_key(("model", "lora", key), node, PEFT_METHODS[method], mistakes)


def explain_moved_key(key: str, recipe_key: Location, node: Node, root: Node) -> str:
    """Name the recipe's key for it, and whether that is set already."""
    other = node_at(root, recipe_key)
    is_always_set = recipe_key in (("name",), ("stage",))
    if other is None or is_always_set or recipe_key[0] == "training":
        return f"`training.{key}` does not belong here: write {format_new_key(key)}"
    name = dotted(recipe_key)
    position = other.position.seen_from(node.position)
    return f"`training.{key}` and `{name}` ({position}) set the same thing. Keep `{name}`"


def check_key(location: Location, node: Node, config: str, mistakes: Mistakes) -> None:
    """Check that the class has the key, and that the value has its type and is within its bounds."""
    keys = keys_of_config(config)
    name = str(location[-1])
    value = plain(node)
    if name not in keys:
        usable = keys.keys() - {*MOVED, *NO_EFFECT, *LORA_IS_SET}
        text = f"`{dotted(location)}` is not a key of {config.partition(':')[2]}."
        mistakes.add(node.position, text + suggestion(name, sorted(usable), location[:-1]))
        return
    key = keys[name]
    problem = None
    if isinstance(value, float) and not math.isfinite(value):
        problem = f"must be a finite number, got {in_yaml(value)}"
    elif not any(fits(value, kind) for kind in key.kinds):
        problem = expected(key.kinds, value)
        if location[0] == "training" and name in AUTOMATIC:
            problem = problem.replace(", got ", f" or {AUTO}, got ", 1)
    elif isinstance(value, str) and key.choices and value not in key.choices:
        problem = one_of(key.choices, value)
    elif name in BOUNDS and type(value) in (int, float):
        read_option(node, location, BOUNDS[name], mistakes)
    if problem:
        mistakes.add(node.position, f"`{dotted(location)}`: {problem}")
    elif isinstance(value, float) and float not in key.kinds and int in key.kinds:
        node.value = int(value)
