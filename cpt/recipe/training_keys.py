"""The keys that are passed on unchanged, checked against the class that receives them: `training:` and
`model.lora`."""

import math
from collections.abc import Callable, Mapping

from cpt.errors import RecipeError, ResourceError
from cpt.extend import closest
from cpt.python_sources import find_class
from cpt.recipe.automatic import AUTO, AUTOMATIC
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, Key, keys_of_config
from cpt.recipe.moved_keys import MOVED, NO_EFFECT, NO_EFFECT_ON_EXAMPLES, OTHER_WORDS, new_home
from cpt.recipe.peft_methods import LORA, config_of_method, method_of, takes_4_bit
from cpt.recipe.references import find_file
from cpt.recipe.schema import LORA_PRESETS, LORA_QUANTIZATION
from cpt.recipe.sections import all_keys
from cpt.recipe.shape import one_of
from cpt.recipe.tree import Location, Mistakes, Node, dotted, node_at, plain
from cpt.recipe.words import expected, fits, in_yaml, kind_of
from cpt.recipe.yaml_lines import shown_path

Bound = tuple[str, Callable[[float], bool]]
AT_LEAST_0: Bound = ("at least 0", lambda value: value >= 0)
ABOVE_0: Bound = ("more than 0", lambda value: value > 0)
SHARE: Bound = ("from 0 to 1", lambda value: 0 <= value <= 1)
PART: Bound = ("at least 0 and less than 1", lambda value: 0 <= value < 1)
SHARE_ABOVE_0: Bound = ("more than 0 and at most 1", lambda value: 0 < value <= 1)
PORT: Bound = ("a port from 1 to 65535", lambda value: 1 <= value <= 65535)


def at_least_1(unit: str) -> Bound:
    """A count of something."""
    return f"at least 1 {unit}", lambda value: value >= 1


BOUNDS: Mapping[str, Bound] = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), at_least_1("row")),
    **dict.fromkeys(("gradient_accumulation_steps", "steps_per_generation"), at_least_1("micro-batch")),
    **dict.fromkeys(("torch_empty_cache_steps", "ref_model_sync_steps", "num_iterations"), at_least_1("step")),
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "vllm_max_model_length", "pad_to_multiple_of"), at_least_1("token")
    ),
    **dict.fromkeys(("num_generations", "num_generations_eval", "generation_batch_size"), at_least_1("completion")),
    **dict.fromkeys(("dataset_num_proc", "vllm_tensor_parallel_size"), at_least_1("process")),
    "logging_steps": (
        "a whole number of steps, or a share of all steps between 0 and 1",
        lambda value: 0 < value < 1 or value >= 1 and value == int(value),
    ),
    "max_grad_norm": ("at least 0 (0 turns clipping off)", lambda value: value >= 0),
    "dataloader_num_workers": ("at least 0 processes", lambda value: value >= 0),
    "dataloader_prefetch_factor": at_least_1("batch"),
    "precompute_ref_batch_size": at_least_1("row"),
    "ddp_bucket_cap_mb": at_least_1("MB"),
    "ddp_timeout": at_least_1("second"),
    "vllm_server_timeout": ("more than 0 seconds", lambda value: value > 0),
    "top_k": ("at least -1 (-1 and 0 turn it off)", lambda value: value >= -1),
    "r": at_least_1("dimension"),
    **dict.fromkeys(("vllm_server_port", "vllm_group_port"), PORT),
    **dict.fromkeys(("label_smoothing_factor", "label_smoothing", "lora_dropout"), PART),
    **dict.fromkeys(
        ("ld_alpha", "ref_model_mixup_alpha", "min_p", "top_entropy_quantile", "gamma", "lam", "lmbda"), SHARE
    ),
    **dict.fromkeys(("top_p", "vllm_gpu_memory_utilization"), SHARE_ABOVE_0),
    **dict.fromkeys(
        ("temperature", "repetition_penalty", "half_life", "sapo_temperature_neg", "sapo_temperature_pos"), ABOVE_0
    ),
    **dict.fromkeys(
        ("beta", "epsilon", "epsilon_high", "delta", "neftune_noise_alpha", "router_aux_loss_coef"), AT_LEAST_0
    ),
    **dict.fromkeys(
        ("desirable_weight", "undesirable_weight", "cpo_alpha", "value_coefficient", "value_clip"), AT_LEAST_0
    ),
}
"""The numbers that Hugging Face's classes accept outside these bounds, and fail on later or treat in an unexpected
way."""
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
        for key, node in training.value.items() if config else ():
            check_training_key(key, node, root, config or "", mistakes)
        find_deepspeed_file(training, mistakes)
    if lora is not None and isinstance(lora.value, dict):
        check_lora_keys(lora, mistakes)


def check_lora_keys(lora: Node, mistakes: Mistakes) -> None:
    """The options of the method's own config class, and what cpt adds to them."""
    method = {key: node.value for key, node in lora.value.items() if key == "method"}
    try:
        config = config_of_method(method)
    except RecipeError as problem:
        mistakes.add(lora.value["method"].place, str(problem))
        return
    for key, node in lora.value.items():
        if key in LORA_IS_SET:
            mistakes.add(node.place, f"`model.lora.{key}` is set by cpt: remove it")
        elif key == "preset" or key in LORA_QUANTIZATION:
            if wrong := wrong_extra(key, node.value, method_of(method)):
                mistakes.add(node.place, f"`model.lora.{key}`: {wrong}")
        elif key != "method":
            check_key(("model", "lora", key), node, config, mistakes)


def wrong_extra(key: str, value: object, method: str) -> str | None:
    """Why what cpt adds to peft's options cannot stand there, or None."""
    choices = LORA_PRESETS if key == "preset" else LORA_QUANTIZATION[key]
    if value not in choices:
        return one_of(map(in_yaml, choices), value)
    if key == "preset":
        return None if method == LORA else f"{value} is for `method: lora`, not for {method}: remove one of them"
    return None if takes_4_bit(method) else f"peft's {method} has no layer for weights in 4 bit: remove it"


def config_of_stage(root: Node) -> str | None:
    """The config class that receives `training:`, None where only the stage's own code can tell."""
    stage = node_at(root, ("stage",))
    if stage is not None and isinstance(stage.value, str) and "." in stage.value:
        return config_of_users_stage(stage.value)
    return STAGE_CONFIGS.get(str(stage.value) if stage else "cpt", STAGE_CONFIGS["cpt"])


def config_of_users_stage(module: str) -> str | None:
    """The class behind `module`'s CONFIG, if its source shows it; if not, the class itself judges when it is built."""
    try:
        found = find_class(module, "CONFIG")
        config = f"{found.source.module}:{found.node.name}" if found else None
        return config if config and keys_of_config(config) else None
    except ResourceError:
        return None


def check_training_key(key: str, node: Node, root: Node, config: str, mistakes: Mistakes) -> None:
    """Ours, without effect, gone, unknown, or of the wrong type?"""
    location = ("training", key)
    if key in MOVED:
        mistakes.add(node.place, same_knob(key, node, root))
    elif reason := NO_EFFECT.get(key) or (
        NO_EFFECT_ON_EXAMPLES.get(key) if config in STAGE_CONFIGS.values() else None
    ):
        mistakes.add(node.place, f"`{dotted(location)}` would have no effect: {reason}. Remove it")
    elif node.value == AUTO and key in AUTOMATIC:
        return  # a number takes its place before anybody else reads it
    else:
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
    is_known = config in (*STAGE_CONFIGS.values(), config_of_method({})) or key in keys_of_config(STAGE_CONFIGS["cpt"])
    if (
        problem is None
        and is_known
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
