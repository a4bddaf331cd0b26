"""Check that keys exist and values have the right type, the first check; also for Hugging Face's keys."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
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
    except ValidationError as found:
        problems = found.errors(include_url=False)
    for location, text in sentences(problems, plain_recipe):
        written = nodes_along(root, location)
        if not any(node.broken for node in written):
            mistakes.add(written[-1].position, text)
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
    section = section_in(annotation) or next(
        (part for part in map(section_in, get_args(annotation)) if part), None
    )
    if section is None or not isinstance(node.value, dict):
        return
    name = node.value["name"].value if "name" in node.value else None
    is_own = isinstance(name, str) and ":" in name
    for key, child in node.value.items():
        here = (*location, key)
        if not issubclass(section, Component) or key in keys_of(section):
            read_option_numbers(child, mistakes, child_annotation(annotation, key), here)
        elif (
            section is Schedule and key == "schedule"
        ):  # of `continued`: the schedule of the previous run
            read_option_numbers(child, mistakes, Schedule, here)
        elif child.value is not None and not child.broken:
            bounds = None if is_own or not location else OPTIONS.get(str(location[-1]), {}).get(key)
            by_ending = next(
                (kind for end, kind in OF_ANY_FUNCTION.items() if key.endswith(end)), Any
            )
            read_option(child, here, bounds or by_ending, mistakes)


def read_option(node: Node, location: Location, annotation: Any, mistakes: Mistakes) -> None:
    """Replace a text with a unit by its number; add a mistake if it is out of bounds."""
    adapter: TypeAdapter[Any] = TypeAdapter(
        annotation, config=ConfigDict(strict=True, allow_inf_nan=False)
    )
    try:
        value = adapter.validate_python(plain(node))
    except ValidationError as found:
        for problem in found.errors(include_url=False):
            mistakes.add(
                node.position, f"`{dotted((*location, *problem['loc']))}`: {wrong_value(problem)}"
            )
        return
    if isinstance(node.value, str):
        node.value = value
    if isinstance(value, float) and not math.isfinite(value):
        mistakes.add(
            node.position, f"`{dotted(location)}`: must be a finite number, got {in_yaml(value)}"
        )


def sentences(
    problems: Iterable[ErrorDetails], written: Mapping[str, Any]
) -> Iterator[tuple[Location, str]]:
    """Yield mistakes and their locations; pydantic reports a problem for each type that a key may have."""
    by_key: dict[Location, list[ErrorDetails]] = {}
    for problem in problems:
        location = location_of(problem, written)
        if problem["loc"][-1] == "[key]":
            yield location, sentence(problem, location)
        else:
            by_key.setdefault(location, []).append(problem)
    for location, found in by_key.items():
        others = [problem for problem in found if problem["type"] not in {*KINDS, "literal_error"}]
        for problem in others:
            yield location, sentence(problem, location)
        if not others and not any(
            other != location and other[: len(location)] == location for other in by_key
        ):
            yield location, f"`{dotted(location)}`: {wrong_type(found)}"


def location_of(problem: ErrorDetails, written: Any) -> Location:
    """Return the steps to a key without those that pydantic adds: names of types, and "[key]" for a mapping's key."""
    location: Location = ()
    for step in problem["loc"]:
        if (
            step in written
            if isinstance(written, dict)
            else isinstance(written, list) and isinstance(step, int)
        ):
            location = (*location, step)
            written = written[step]
    if problem["type"] == "missing":
        return (*location, problem["loc"][-1])
    return location


def sentence(problem: ErrorDetails, location: Location) -> str:
    """Describe the mistake of one key: unknown, missing, or with a wrong value."""
    *above, key = location
    section = section_in(annotation_at(tuple(above)))
    fields = keys_of(section) if section else {}
    if problem["type"] == "extra_forbidden":
        where = f"a key of `{dotted(above)}`" if above else "a recipe key"
        return f"`{dotted(location)}` is not {where}.{suggestion(str(key), list(fields), tuple(above))}"
    if problem["type"] == "missing":
        field = fields[str(key)]
        inner = section_in(field.annotation)
        return f"`{dotted(location)}` is missing. {field.description or (inner and inner.__doc__) or ''}".rstrip()
    return f"`{dotted(location)}`: {wrong_value(problem)}"


def suggestion(name: str, beside: Collection[str], above: Location) -> str:
    """Suggest a key: a similar one in the same section, else the same name elsewhere, else a similar one elsewhere."""
    if simplified(name) in beside:
        return did_you_mean(name, beside)
    known = key_of_others(name, above)
    if known is not None:
        return f" Write it as {format_new_key(known)}."
    if name in NOT_NEEDED:
        return f" Remove it: {NOT_NEEDED[name]}."
    if name in NOT_SUPPORTED:
        return f" Not supported: {NOT_SUPPORTED[name]}."
    near = closest(name, [*beside, *MOVED])
    if near is None or SequenceMatcher(None, name, near).ratio() < 0.85:
        elsewhere = [key for key in all_keys() if key[-1] == name and key[:-1] != above]
        inside = [key for key in elsewhere if key[: len(above)] == above]
        if elsewhere:
            return f" Use {' or '.join(f'`{dotted(key)}`' for key in inside or elsewhere)}."
        if name in NO_EFFECT:
            return f" It would have no effect: {NO_EFFECT[name]}."
        if name in keys_of_config(STAGE_CONFIGS["cpt"]):
            return f" It is a Hugging Face key: write it as `training.{name}`."
    if near is not None:
        return f" Did you mean `{near}`?{'' if near in beside else f' It is written as {format_new_key(near)}.'}"
    if len(beside) <= MOST_LISTED:
        return f" Known keys: {', '.join(beside)}."
    return ""


def wrong_value(problem: ErrorDetails) -> str:
    kind = problem["type"]
    got = problem["input"]
    context = problem.get("ctx", {})
    if kind in COMPARISONS:
        limits = {
            name: int(limit) if limit == int(limit) else limit for name, limit in context.items()
        }
        return f"must be {COMPARISONS[kind].format(**limits)}, got {in_yaml(got)}"
    if kind == "value_error":
        return f"{context['error']}, got {in_words(got)}"
    if kind == "string_pattern_mismatch":
        return f"must be letters, digits, `.`, `_` and `-`, starting with a letter or digit; got {in_words(got)}"
    if kind in ("too_short", "string_too_short"):
        return "must not be empty"
    return wrong_type([problem])


def wrong_type(problems: Sequence[ErrorDetails]) -> str:
    """Describe a value that has none of the types that the key allows."""
    got = problems[0]["input"]
    kinds = [KINDS[problem["type"]] for problem in problems if problem["type"] in KINDS]
    listed = ", ".join(
        problem["ctx"]["expected"] for problem in problems if problem["type"] == "literal_error"
    )
    words = listed.replace("'", "").replace(" or ", ", ").split(", ") + ["true", "false"] * (
        bool in kinds
    )
    if listed:
        return one_of(words, got)
    return expected(kinds, got)


def one_of(choices: Iterable[str], got: object) -> str:
    """expected one of auto, float32; got the text "flaot32". Did you mean `float32`?"""
    choices = list(choices)
    hint = did_you_mean(got, choices) if isinstance(got, str) else ""
    return f"expected one of {', '.join(choices)}; got {in_words(got)}.{hint}".removesuffix(".")


AT_LEAST_1 = (
    *(
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "ddp_timeout",
    ),
    *("steps_per_generation", "num_iterations", "num_generations", "generation_batch_size"),
    *(
        "max_completion_length",
        "max_new_tokens",
        "dataloader_prefetch_factor",
        "ddp_bucket_cap_mb",
        "r",
    ),
)
ABOVE_0 = ("temperature", "repetition_penalty", "half_life")
AT_LEAST_0 = (
    *(
        "max_grad_norm",
        "dataloader_num_workers",
        "beta",
        "epsilon",
        "epsilon_high",
        "neftune_noise_alpha",
    ),
    *("desirable_weight", "undesirable_weight", "cpo_alpha", "value_coefficient", "value_clip"),
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
    *("peft_type", "task_type", "inference_mode", "base_model_name_or_path"),
    *("auto_mapping", "peft_version", "revision"),
}
LORA_CHOICES = {"preset": LORA_PRESETS, **LORA_QUANTIZATION}


def check_passed_on_keys(root: Node, mistakes: Mistakes) -> None:
    """Check the keys of `training:` and `model.lora`, and convert whole numbers and paths for Hugging Face."""
    training, lora, stage = (
        node_at(root, key) for key in (("training",), ("model", "lora"), ("stage",))
    )
    if training is not None and isinstance(training.value, dict):
        name = str(stage.value) if stage else "cpt"
        # The class of a custom stage checks its keys itself.
        config = None if "." in name else STAGE_CONFIGS.get(name, STAGE_CONFIGS["cpt"])
        for key, node in training.value.items():
            if refuse_key(key, node, name, root, mistakes):
                continue
            if config is not None and not (
                node.value == AUTO and key in AUTOMATIC
            ):  # a number replaces auto later
                check_key(("training", key), node, config, mistakes)
    if lora is not None and isinstance(lora.value, dict):
        check_lora_keys(lora, mistakes)


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
    place = recipe_key_of(key, stage)
    value = plain(node)
    if place is not None:
        problem: str | None = explain_moved_key(key, place, node, root)
    else:
        problem = why_refused(key, stage)
    if problem is None and isinstance(value, str):
        reason = NO_EFFECT_OF_VALUE.get((key, value))
        problem = reason and f"`training.{key}: {value}` would have no effect: {reason}"
    if problem is not None:
        mistakes.add(node.position, problem)
    return problem is not None


def check_lora_keys(lora: Node, mistakes: Mistakes) -> None:
    """Check the options of the method's config class, and those that cpt adds."""
    method = method_of({key: node.value for key, node in lora.value.items() if key == "method"})
    if method not in PEFT_METHODS:
        mistakes.add(
            lora.value["method"].position, f"`model.lora.method`: {one_of(PEFT_METHODS, method)}"
        )
        return
    for key, node in lora.value.items():
        if key in LORA_IS_SET:
            mistakes.add(node.position, f"`model.lora.{key}` is set by cpt: remove it")
        elif key in LORA_CHOICES:
            if node.value not in LORA_CHOICES[key]:
                mistakes.add(
                    node.position,
                    f"`model.lora.{key}`: {one_of(map(in_yaml, LORA_CHOICES[key]), node.value)}",
                )
            elif method not in ((LORA,) if key == "preset" else TAKES_QUANTIZED):
                mistakes.add(
                    node.position,
                    f"`model.lora.{key}` is not for `method: {method}`: remove one of them",
                )
        elif key != "method":
            check_key(("model", "lora", key), node, PEFT_METHODS[method], mistakes)


def explain_moved_key(key: str, place: Location, node: Node, root: Node) -> str:
    """Name the recipe's key for it, and whether that is set already."""
    ours = node_at(root, place)
    is_named_by_run = len(place) == 1 and place[0] in ("name", "stage")
    if ours is None or is_named_by_run or place[0] == "training":
        return f"`training.{key}` does not belong here: write {format_new_key(key)}"
    name = dotted(place)
    there = ours.position.seen_from(node.position)
    return f"`training.{key}` and `{name}` ({there}) set the same thing. Keep `{name}`"


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
