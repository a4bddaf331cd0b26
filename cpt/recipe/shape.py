"""The first gate: does every key exist, and is every value of its type? Keys of Hugging Face's classes too."""

import math
from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from typing import Annotated, Any, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from cpt.plugins import closest, did_you_mean, fits, simplified
from cpt.recipe.huggingface_keys import LORA, PEFT_METHODS, STAGE_CONFIGS, TAKES_4_BIT, Key, keys_of_config, method_of
from cpt.recipe.keys import (
    AUTO,
    AUTOMATIC,
    MOVED,
    NO_EFFECT,
    NO_EFFECT_ON_EXAMPLES,
    OTHER_WORDS,
    all_keys,
    annotation_at,
    child_annotation,
    format_new_key,
    is_free_mapping,
    item_in,
    keys_of,
    section_in,
    types_in,
    without_none,
)
from cpt.recipe.schema import LORA_PRESETS, LORA_QUANTIZATION, Component, Recipe, Schedule
from cpt.recipe.tree import Location, Mistakes, Node, dotted, node_at, nodes_along, plain
from cpt.recipe.values import OF_ANY_FUNCTION, OPTIONS, StepsOrShare, expected, in_words, in_yaml

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
        written = nodes_along(root, location)
        if not any(node.broken for node in written):
            mistakes.add(written[-1].place, text)
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
            by_ending = next((kind for end, kind in OF_ANY_FUNCTION.items() if key.endswith(end)), Any)
            read_option(child, here, bounds or by_ending, mistakes)


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
        location: Location = ()
        key_of_several: Location | None = None
        for step in problem["loc"]:  # names of types, and "[key]" of a mapping's key, are not steps to a key
            if key_of_several is None and len(types_in(annotation_at(location))) > 1:
                key_of_several = location
            elif step != "[key]":
                location = (*location, step)
        if key_of_several is None:
            yield location, sentence(problem, location)
        else:
            by_key.setdefault(key_of_several, []).append((location, problem))
    for key, found in by_key.items():
        of_values = [one for one in found if one[1]["type"] in {*COMPARISONS, "value_error"}]
        inside = [one for one in found if one[0] != key] or of_values
        for location, problem in inside:
            yield location, sentence(problem, location)
        if not inside:
            kinds, got = kinds_of(annotation_at(key)), found[0][1]["input"]
            words = [word for _, problem in found for word in words_of(problem)]
            words += ["true", "false"] * (bool in kinds)
            yield key, f"`{dotted(key)}`: {one_of(words, got) if words else expected(kinds, got)}"


def sentence(problem: ErrorDetails, location: Location) -> str:
    """What is wrong with one key: unknown, missing, or of a wrong value."""
    *above, key = location
    section = section_in(annotation_at(tuple(above)))
    fields = keys_of(section) if section else {}
    if problem["type"] == "extra_forbidden":
        where = f"a key of `{dotted(above)}`" if above else "a recipe key"
        return f"`{dotted(location)}` is not {where}.{suggestion(str(key), list(fields), tuple(above))}"
    if problem["type"] == "missing":
        field = fields.get(str(key))
        inner = section_in(field.annotation) if field else None
        purpose = (field.description if field else None) or (inner.__doc__ if inner else None)
        return f"`{dotted(location)}` is missing.{f' {purpose}' if purpose else ''}"
    return f"`{dotted(location)}`: {wrong_value(problem, annotation_at(location))}"


def suggestion(name: str, beside: list[str], above: Location) -> str:
    """The key that was meant: a slip of one beside it, else one of that very name elsewhere, else one much like it."""
    if simplified(name) in beside:
        return did_you_mean(name, beside)
    if name in MOVED or name in OTHER_WORDS:
        return f" Write it as {format_new_key(name)}."
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


def wrong_value(problem: ErrorDetails, annotation: Any) -> str:
    kind, got, context = problem["type"], problem["input"], problem.get("ctx", {})
    if kind in COMPARISONS:
        limits = {name: int(limit) if limit == int(limit) else limit for name, limit in context.items()}
        return f"must be {COMPARISONS[kind].format(**limits)}, got {in_yaml(got)}"
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
    """The words that the key takes; empty where it takes other values."""
    listed = problem["ctx"]["expected"] if problem["type"] == "literal_error" else ""
    return listed.replace("'", "").replace(" or ", ", ").split(", ") if listed else []


def one_of(choices: Iterable[str], got: object) -> str:
    """expected one of auto, float32; got the text "flaot32". Did you mean `float32`?"""
    choices = list(choices)
    hint = did_you_mean(got, choices) if isinstance(got, str) else ""
    return f"expected one of {', '.join(choices)}; got {in_words(got)}.{hint}".removesuffix(".")


def kinds_of(annotation: Any) -> list[type]:
    """The types of YAML values that an annotation of the schema allows."""
    if len(types := types_in(annotation)) > 1:
        return [kind for one in types for kind in kinds_of(one)]
    if section_in(annotation) or is_free_mapping(annotation):
        return [dict]
    if item_in(annotation) is not None:
        return [list]
    inner = without_none(annotation)
    return [inner] if inner in (bool, int, float, str) else [str]


AT_LEAST_1 = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "ddp_timeout"),
    *("steps_per_generation", "num_iterations", "num_generations", "generation_batch_size"),
    *("max_completion_length", "max_new_tokens", "dataloader_prefetch_factor", "ddp_bucket_cap_mb", "r"),
)
ABOVE_0 = ("temperature", "repetition_penalty", "half_life")
AT_LEAST_0 = (
    *("max_grad_norm", "dataloader_num_workers", "beta", "epsilon", "epsilon_high", "neftune_noise_alpha"),
    *("desirable_weight", "undesirable_weight", "cpo_alpha", "value_coefficient", "value_clip"),
)
BELOW_1 = ("label_smoothing_factor", "label_smoothing", "lora_dropout")
SHARES = ("top_p", "min_p", "gamma", "lam", "lmbda", "ref_model_mixup_alpha", "vllm_gpu_memory_utilization")
BOUNDS: Mapping[str, Any] = {
    **dict.fromkeys(AT_LEAST_1, Annotated[float, Field(ge=1)]),
    **dict.fromkeys(ABOVE_0, Annotated[float, Field(gt=0)]),
    **dict.fromkeys(AT_LEAST_0, Annotated[float, Field(ge=0)]),
    **dict.fromkeys(BELOW_1, Annotated[float, Field(ge=0, lt=1)]),
    **dict.fromkeys(SHARES, Annotated[float, Field(ge=0, le=1)]),
    "logging_steps": StepsOrShare,
}
"""Numbers that Hugging Face's classes accept outside these bounds, and fail on later or use in an unexpected way."""
LORA_IS_SET = {
    *("peft_type", "task_type", "inference_mode", "base_model_name_or_path"),
    *("auto_mapping", "peft_version", "revision"),
}


def check_passed_on_keys(root: Node, mistakes: Mistakes) -> None:
    """Check the keys of `training:` and `model.lora`, and give whole numbers and paths the form that Hugging Face
    wants."""
    training, lora, stage = (node_at(root, key) for key in (("training",), ("model", "lora"), ("stage",)))
    if training is not None and isinstance(training.value, dict):
        name = str(stage.value) if stage else "cpt"
        # The class of a user's stage checks its own keys.
        config = None if "." in name else STAGE_CONFIGS.get(name, STAGE_CONFIGS["cpt"])
        for key, node in training.value.items():
            if key in MOVED:
                mistakes.add(node.place, explain_moved_key(key, node, root))
            elif reason := NO_EFFECT.get(key) or (NO_EFFECT_ON_EXAMPLES.get(key) if config else None):
                mistakes.add(node.place, f"`training.{key}` would have no effect: {reason}. Remove it")
            elif config is not None and not (node.value == AUTO and key in AUTOMATIC):  # a number replaces auto later
                check_key(("training", key), node, config, mistakes)
    if lora is not None and isinstance(lora.value, dict):
        check_lora_keys(lora, mistakes)


def check_lora_keys(lora: Node, mistakes: Mistakes) -> None:
    """The options of the method's own config class, and what cpt adds to them."""
    method = method_of({key: node.value for key, node in lora.value.items() if key == "method"})
    if method not in PEFT_METHODS:
        mistakes.add(lora.value["method"].place, f"`model.lora.method`: {one_of(PEFT_METHODS, method)}")
        return
    for key, node in lora.value.items():
        if key in LORA_IS_SET:
            mistakes.add(node.place, f"`model.lora.{key}` is set by cpt: remove it")
        elif key == "preset" or key in LORA_QUANTIZATION:
            choices = LORA_PRESETS if key == "preset" else LORA_QUANTIZATION[key]
            if node.value not in choices:
                mistakes.add(node.place, f"`model.lora.{key}`: {one_of(map(in_yaml, choices), node.value)}")
            elif method not in ((LORA,) if key == "preset" else TAKES_4_BIT):
                mistakes.add(node.place, f"`model.lora.{key}` is not for `method: {method}`: remove one of them")
        elif key != "method":
            check_key(("model", "lora", key), node, PEFT_METHODS[method], mistakes)


def explain_moved_key(key: str, node: Node, root: Node) -> str:
    """Where a key is written here, and that it is written there already, if so."""
    ours = node_at(root, MOVED[key])
    if ours is None or len(MOVED[key]) == 1 and MOVED[key][0] in ("name", "stage") or MOVED[key][0] == "training":
        return f"`training.{key}` is not written here: write {format_new_key(key)}"
    there = f"line {ours.place.line}" if ours.place.file == node.place.file and ours.place.line else str(ours.place)
    here = f"line {node.place.line}" if node.place.line else "the command line"
    name = dotted(MOVED[key])
    return f"one knob is set twice: `{name}` ({there}) and `training.{key}` ({here}). Keep `{name}`"


def check_key(location: Location, node: Node, config: str, mistakes: Mistakes) -> None:
    """Does the class have the key, and is the value of its type and within its bounds?"""
    keys, name, value = keys_of_config(config), str(location[-1]), plain(node)
    if name not in keys:
        class_name = config.partition(":")[2]
        mistakes.add(node.place, f"`{dotted(location)}` is not a key of {class_name}.{suggest_config_key(name, keys)}")
        return
    key, problem = keys[name], None
    if isinstance(value, float) and not math.isfinite(value):
        problem = f"must be a finite number, got {in_yaml(value)}"
    elif not any(fits(value, kind) for kind in key.kinds):
        problem = expected(key.kinds, value)
        if location[0] == "training" and name in AUTOMATIC:
            problem = problem.replace(", got ", f" or {AUTO}, got ", 1)
    elif isinstance(value, str) and key.enums and value not in key.choices():
        problem = one_of(key.choices(), value)
    elif name in BOUNDS and type(value) in (int, float):
        read_option(node, location, BOUNDS[name], mistakes)
    if problem:
        mistakes.add(node.place, f"`{dotted(location)}`: {problem}")
    elif isinstance(value, float) and float not in key.kinds and int in key.kinds:
        node.value = int(value)


def suggest_config_key(key: str, keys: Mapping[str, Key]) -> str:
    """The Hugging Face key that was meant, or ours of that name."""
    if key in MOVED or key in OTHER_WORDS:
        return f" Write it as {format_new_key(key)}."
    ours = [dotted(location) for location in all_keys() if location[-1] == key and 0 not in location]
    if len(ours) == 1:
        return f" It is `{ours[0]}`."
    if key in keys_of_config(STAGE_CONFIGS["cpt"]) and key not in NO_EFFECT:
        return f" It is `training.{key}`."
    usable = {name for name in keys if not {name} & {*MOVED, *NO_EFFECT, *LORA_IS_SET}}
    near = closest(key, [*usable, *MOVED])
    if near is None:
        return ""
    return f" Did you mean `{near}`?{'' if near in usable else f' It is written as {format_new_key(near)}.'}"
