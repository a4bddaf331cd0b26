"""The keys that are passed on unchanged, checked against the class that receives them: `training:` and
`model.lora`."""

import math
from collections.abc import Callable, Mapping

from cpt.plugins import closest
from cpt.recipe.automatic import AUTO, AUTOMATIC
from cpt.recipe.huggingface_keys import LORA, PEFT_METHODS, STAGE_CONFIGS, TAKES_4_BIT, Key, keys_of_config, method_of
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, NO_EFFECT_ON_EXAMPLES, OTHER_WORDS, new_home
from cpt.recipe.references import find_file
from cpt.recipe.schema import LORA_PRESETS, LORA_QUANTIZATION
from cpt.recipe.sections import all_keys
from cpt.recipe.shape import one_of
from cpt.recipe.tree import Location, Mistakes, Node, dotted, node_at, plain
from cpt.recipe.words import expected, fits, in_yaml, kind_of
from cpt.recipe.yaml_lines import shown_path

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
BOUNDS: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    **dict.fromkeys(AT_LEAST_1, ("at least 1", lambda value: value >= 1)),
    **dict.fromkeys(ABOVE_0, ("more than 0", lambda value: value > 0)),
    **dict.fromkeys(AT_LEAST_0, ("at least 0", lambda value: value >= 0)),
    **dict.fromkeys(BELOW_1, ("at least 0 and less than 1", lambda value: 0 <= value < 1)),
    **dict.fromkeys(SHARES, ("from 0 to 1", lambda value: 0 <= value <= 1)),
    "logging_steps": (
        "a whole number of steps, or a share of all steps between 0 and 1",
        lambda value: 0 < value < 1 or value >= 1 and value == int(value),
    ),
}
"""Numbers that Hugging Face's classes accept outside these bounds, and fail on later or use in an unexpected way."""
LORA_IS_SET = {
    *("peft_type", "task_type", "inference_mode", "base_model_name_or_path"),
    *("auto_mapping", "peft_version", "revision"),
}


def check_passed_on_keys(root: Node, mistakes: Mistakes) -> None:
    """Check the keys of `training:` and `model.lora`, and give whole numbers and paths the form that Hugging Face
    wants."""
    training, lora = node_at(root, ("training",)), node_at(root, ("model", "lora"))
    if training is not None and isinstance(training.value, dict):
        config = config_of_stage(root)
        for key, node in training.value.items():
            check_training_key(key, node, root, config, mistakes)
        find_deepspeed_file(training, mistakes)
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


def config_of_stage(root: Node) -> str | None:
    """The built-in config class that receives `training:`; None for a user's stage, whose class checks its keys."""
    stage = node_at(root, ("stage",))
    if stage is not None and isinstance(stage.value, str) and "." in stage.value:
        return None
    return STAGE_CONFIGS.get(str(stage.value) if stage else "cpt", STAGE_CONFIGS["cpt"])


def check_training_key(key: str, node: Node, root: Node, config: str | None, mistakes: Mistakes) -> None:
    """Ours, without effect, gone, unknown, or of the wrong type?"""
    location = ("training", key)
    if key in MOVED:
        mistakes.add(node.place, same_knob(key, node, root))
    elif reason := NO_EFFECT.get(key) or (NO_EFFECT_ON_EXAMPLES.get(key) if config else None):
        mistakes.add(node.place, f"`{dotted(location)}` would have no effect: {reason}. Remove it")
    elif config is not None and not (node.value == AUTO and key in AUTOMATIC):  # a number takes the place of auto
        check_key(location, node, config, mistakes)


def same_knob(key: str, node: Node, root: Node) -> str:
    """Where a key is written here, and that it is written there already, if so."""
    ours = node_at(root, MOVED[key])
    if ours is None or len(MOVED[key]) == 1 and MOVED[key][0] in ("name", "stage") or MOVED[key][0] == "training":
        return f"`training.{key}` is not written here: write {new_home(key)}"
    there = f"line {ours.place.line}" if ours.place.file == node.place.file and ours.place.line else str(ours.place)
    here = f"line {node.place.line}" if node.place.line else "the command line"
    return (
        f"one knob is set twice: `{dotted(MOVED[key])}` ({there}) and `training.{key}` ({here}). Keep"
        f" `{dotted(MOVED[key])}`"
    )


def check_key(location: Location, node: Node, config: str, mistakes: Mistakes) -> None:
    """Does the class have the key, and is the value of its type?"""
    keys, key = keys_of_config(config), str(location[-1])
    if key not in keys:
        class_name = config.partition(":")[2]
        mistakes.add(node.place, f"`{dotted(location)}` is not a key of {class_name}.{hint(key, keys)}")
        return
    problem = wrong_value(node, keys[key])
    if problem and location[0] == "training" and key in AUTOMATIC:
        problem = problem.replace(", got ", f" or {AUTO}, got ", 1)
    if (
        problem is None
        and key in BOUNDS
        and kind_of(node.value) in ("int", "float")
        and not BOUNDS[key][1](node.value)
    ):
        problem = f"expected {BOUNDS[key][0]}, got {in_yaml(node.value)}"
    if problem:
        mistakes.add(node.place, f"`{dotted(location)}`: {problem}")
    elif isinstance(node.value, float) and "float" not in keys[key].kinds and "int" in keys[key].kinds:
        node.value = int(node.value)


def wrong_value(node: Node, key: Key) -> str | None:
    """Why the value cannot stand there, or None."""
    if isinstance(node.value, float) and not math.isfinite(node.value):
        return f"must be a finite number, got {in_yaml(node.value)}"
    if not fits(plain(node), key.kinds):
        return expected(key.kinds, plain(node))
    if isinstance(node.value, str) and key.enums and node.value not in key.choices():
        return one_of(key.choices(), node.value)
    return None


def hint(key: str, keys: Mapping[str, Key]) -> str:
    """The Hugging Face key that was meant, or ours of that name."""
    if key in MOVED or key in OTHER_WORDS:
        return f" Write it as {new_home(key)}."
    ours = [dotted(location) for location in all_keys() if location[-1] == key and 0 not in location]
    if len(ours) == 1:
        return f" It is `{ours[0]}`."
    if key in keys_of_config(STAGE_CONFIGS["cpt"]) and key not in NO_EFFECT:
        return f" It is `training.{key}`."
    usable = {name for name in keys if not {name} & {*MOVED, *NO_EFFECT, *LORA_IS_SET}}
    near = closest(key, [*usable, *MOVED])
    if near is None:
        return ""
    return (
        f" Did you mean `{near}`?" if near in usable else f" Did you mean `{near}`? It is written as {new_home(near)}."
    )


def find_deepspeed_file(training: Node, mistakes: Mistakes) -> None:
    """Replace the path under `training.deepspeed` by the file it means, as seen from the current folder."""
    node = training.value.get("deepspeed")
    if node is not None and isinstance(node.value, str) and not node.value.lstrip().startswith("{"):
        path = find_file(node, mistakes)
        if path is not None:
            node.value = shown_path(path)
