"""Check a DeepSpeed profile or `training.fsdp_config` against the recipe."""

import inspect
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import ValidationError

from cpt.distributed import groups_of_rows, read_parallelism, world_size
from cpt.errors import RecipeError, ResourceError
from cpt.optim.build import facts_of, find_optimizer
from cpt.plugins import did_you_mean
from cpt.recipe.keys import DEFAULT_MICRO_BATCH, accumulation, micro_batches_per_step
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import dotted, leaves
from cpt.training.deepspeed_keys import (
    LEFT_OUT,
    REMOVED,
    REPLACED,
    SECTIONS,
    TOP_LEVEL,
    fate_of_key,
    refused_keys,
)

Profile = dict[str, Any]
Complaints = Iterable[tuple[str, str]]  # key of the profile, and the complaint

# `auto` becomes the recipe's value. Without these keys DeepSpeed does not follow the recipe: it would not clip at all.
FROM_THE_RECIPE: Profile = {
    **dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
}
OF_ACCELERATE = {"compute_environment", "distributed_type", "deepspeed_config", "num_machines"}
"""Keys of the file that `accelerate config` writes."""
GATHERS = "stage3_gather_16bit_weights_on_model_save"
OLD_GATHERS = ("gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
DEFAULT_MAX_GRAD_NORM = 1.0  # of TrainingArguments
KEY = "`training.fsdp`"
CONFIG = "`training.fsdp_config`"
FSDP_KEYS = (
    "version",
    "reshard_after_forward",
    "cpu_offload",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
)
ELSEWHERE = {
    "state_dict_type": "checkpoints always have the full model and each process's shard",
    "activation_checkpointing": "write `training.gradient_checkpointing: true`",
    "cpu_ram_efficient_loading": "only the main process loads the weights, always",
}
ADAM = ("adam", "adamw", "cpuadam", "fusedadam", "deepspeedcpuadam")  # types of DeepSpeed
STAGES_THAT_GENERATE = ("grpo", "rloo", "ppo", "spo", "gkd", "distill_on_policy")


def check_profile(setting: str | Path | Profile, recipe: Recipe) -> list[str]:
    """Return all complaints about a DeepSpeed profile, each with file, key and remedy.

    Args:
        setting: value of `training.deepspeed`: a path, or the profile itself.
    """
    profile = read_mapping(setting)
    replaced = (
        *optimizer_contradictions(profile, recipe),
        *scheduler_contradictions(profile, recipe),
    )
    zero = check_zero(completed(profile))
    return located(
        setting,
        unknown_keys(profile),
        refused_keys(profile),
        zero,
        contradictions(profile, recipe),
        replaced,
    )


def profile_warnings(setting: str | Path | Profile, recipe: Recipe) -> list[str]:
    """Warn of settings that DeepSpeed accepts, but that make gradients wrong or less precise."""
    profile = read_profile(setting)
    section = zero_section(profile)
    warnings = list[tuple[str, str]]()
    steps = accumulation(recipe)
    stage = section.get("stage")
    data_types = profile.get("data_types")
    # DeepSpeed 0.19 uses another optimizer for ZeRO-1 with fp32 gradients, and keeps ZeRO-2's gradients on the GPU
    # even if the optimizer is offloaded.
    has_room = stage == 3 or stage == 2 and not offloads(profile, "optimizer")
    dtype = data_types.get("grad_accum_dtype") if isinstance(data_types, Mapping) else None
    if recipe.training.get("bf16") and steps > 1 and has_room and dtype != "fp32":
        text = (
            f"the gradients of {steps} micro-batches accumulate in bfloat16, which rounds each sum. Write"
            ' "data_types": {"grad_accum_dtype": "fp32"} into the profile'
        )
        warnings.append(("data_types", text))
    if stage in (1, 2) and section.get("overlap_comm"):
        text = (
            f"`zero_optimization.overlap_comm` is true at stage {stage}: DeepSpeed's users report wrong"
            " gradients with it on several GPUs (github.com/deepspeedai/DeepSpeed/issues/5294). Write false"
        )
        warnings.append(("overlap_comm", text))
    return located(setting, warnings)


def changes_in_memory(setting: str | Path | Profile) -> list[str]:
    """Return one line with the keys that `read_profile` adds, changes or removes; nothing without changes."""
    before = dict(leaves(read_mapping(setting)))
    after = dict(leaves(read_profile(setting)))
    changes = []
    for key, value in after.items():
        if before.get(key, ...) != value:
            changes.append(f"`{dotted(key)}: {json.dumps(value)}`")
    removed = dict.fromkeys(key[0] for key in before if key[0] in REPLACED)
    replaced = [f"`{key}`" for key in removed if key not in LEFT_OUT]
    if replaced:
        changes.append(f"the recipe's values instead of {', '.join(replaced)}")
    left_out = [f"`{key}`" for key in removed if key in LEFT_OUT]
    parts = list[str]()
    if changes:
        parts.append(f"is used with {', '.join(changes)}")
    if left_out:
        parts.append(f"is used without {', '.join(left_out)}: cpt logs the progress")
    if not parts:
        return []
    name = "`training.deepspeed`" if isinstance(setting, dict) else str(setting)
    return [f"{name} {'; '.join(parts)}"]


def located(setting: str | Path | Profile, *complaints: Complaints) -> list[str]:
    """Format the complaints with their place: `zero.json:12`, or `training.deepspeed` for a profile in the recipe."""
    if isinstance(setting, dict):
        return [f"`training.deepspeed`: {text}" for group in complaints for _, text in group]
    lines = Path(setting).read_text(encoding="utf-8").splitlines()

    def place(key: str) -> str:
        last = key.rpartition(".")[2]
        number = next((number for number, line in enumerate(lines, 1) if f'"{last}"' in line), None)
        if number:
            return f"{setting}:{number}"
        return str(setting)

    return [f"{place(key)}: {text}" for group in complaints for key, text in group]


def read_profile(setting: str | Path | Profile) -> Profile:
    """Return a DeepSpeed profile with the keys that runs need; RecipeError if it is not a mapping in JSON."""
    return completed(read_mapping(setting))


def read_mapping(setting: str | Path | Profile, key: str = "`training.deepspeed`") -> Profile:
    """Return the mapping in the recipe, or in a JSON file; RecipeError if it is neither."""
    content: Any = setting
    if isinstance(setting, str | Path):
        try:
            content = json.loads(Path(setting).read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            refuse_accelerates(yaml_mapping(setting), key)
            raise RecipeError(f"{key}: {setting} cannot be read as JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise RecipeError(f"{key} must be a mapping, or the path of a JSON file, not {setting!r}.")
    refuse_accelerates(content, key)
    return content


def yaml_mapping(path: str | Path) -> Profile:
    """Return the mapping in a YAML file; empty if there is none."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    if isinstance(content, dict):
        return content
    return {}


def refuse_accelerates(content: Profile, key: str) -> None:
    """Refuse the file that `accelerate config` writes, with what to write instead."""
    if not content.keys() & OF_ACCELERATE:
        return
    section = content.get("deepspeed_config") or {}
    of_fsdp = content.get("fsdp_config") is not None
    instead = '`training.deepspeed: {"zero_optimization": {"stage": %s}}`' % (
        section.get("zero_stage") or 2
    )
    if of_fsdp:
        instead = "`training.fsdp: true`"
    elif section.get("deepspeed_config_file"):
        instead = f"`training.deepspeed: {section['deepspeed_config_file']}`"
    raise RecipeError(
        f"{key}: this is the config of `accelerate launch`, not one of the engine. Write {instead}, or remove"
        " the key and start with `accelerate launch --config_file FILE cpt/train.py RECIPE`."
    )


def completed(user_profile: Profile) -> Profile:
    """Return the profile with the keys that runs need, and without the sections that the recipe has."""
    profile = {key: value for key, value in user_profile.items() if key not in REPLACED}
    if "bfloat16" in profile:  # of older DeepSpeed
        profile["bf16"] = profile.pop("bfloat16")
    profile = FROM_THE_RECIPE | profile
    if "zero_allow_untested_optimizer" in profile:  # accelerate sets it, too
        profile["zero_allow_untested_optimizer"] = True
    if "train_batch_size" in profile:
        profile["train_batch_size"] = "auto"
    section = profile.get("zero_optimization")
    if not isinstance(section, Mapping):
        return profile
    section = profile["zero_optimization"] = dict(section)
    for old, new in OLD_OFFLOAD.items():
        if section.pop(old, False) is True:
            section.setdefault(new, {"device": "cpu"})
    for old in OLD_GATHERS:
        section.pop(old, None)
    if section.get("stage") == 3:  # otherwise a checkpoint lacks the weights
        section[GATHERS] = True
    if offloads(profile, "optimizer"):
        # otherwise any optimizer becomes Adam, and decoupled weight decay becomes L2
        profile["zero_force_ds_cpu_optimizer"] = False
    return profile


def unknown_keys(profile: Mapping[str, Any], section: str = "") -> Complaints:
    """DeepSpeed ignores unknown keys, at the top and in some sections."""
    for name, value in profile.items():
        key = f"{section}{name}"
        if key in REPLACED or key == "zero_optimization":  # `check_zero` has the suggestions for it
            continue
        if fate_of_key(key) is None:
            known_keys = SECTIONS[section[:-1]].split() if section else TOP_LEVEL
            text = f"`{key}` is not a key of DeepSpeed, which would ignore it."
            yield key, f"{text}{did_you_mean(name, known_keys)}"
        elif key in SECTIONS and isinstance(value, Mapping):
            yield from unknown_keys(value, f"{key}.")


def check_zero(profile: Profile) -> Complaints:
    """Validate `zero_optimization` with DeepSpeed's class, and check keys that it needs elsewhere."""
    section = profile.get("zero_optimization")
    if not isinstance(section, dict):
        yield (
            "zero_optimization",
            '`zero_optimization` is missing. Write one with a stage: {"stage": 2}',
        )
        return
    if not isinstance(section.get("stage", 0), int):
        text = f"`zero_optimization.stage` is {json.dumps(section['stage'])}: write 1, 2 or 3"
        yield "zero_optimization.stage", text
        return
    if section.get("stage", 0) == 0:
        text = "`zero_optimization.stage` is 0: its checkpoints lack the optimizer's states. Write 1, 2 or 3, or"
        yield "zero_optimization.stage", f"{text} remove `training.deepspeed`"
    try:
        from deepspeed.runtime.zero import config as zero
    except ImportError as problem:
        raise ResourceError(
            f"the recipe uses DeepSpeed, which cannot be imported: {problem}. Install it: pip install deepspeed"
        ) from problem
    parts = {
        "offload_param": zero.DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": zero.DeepSpeedZeroOffloadOptimizerConfig,
    }
    try:
        supported = {}
        for key, value in section.items():
            if f"zero_optimization.{key}" not in REMOVED:
                supported[key] = value
        zero.DeepSpeedZeroConfig(**supported)
    except ValidationError as problem:
        for error in problem.errors():
            *above, last = list(map(str, error["loc"])) or ["zero_optimization"]
            kind = parts.get(above[-1] if above else "", zero.DeepSpeedZeroConfig)
            known_keys = [field.alias or name for name, field in kind.model_fields.items()]
            key = ".".join(["zero_optimization", *above, last])
            unknown = f"is not a key of DeepSpeed.{did_you_mean(last, known_keys)}"
            yield (
                key,
                f"`{key}` {unknown if error['type'] == 'extra_forbidden' else '- ' + error['msg']}",
            )
    scattered = section.get("reduce_scatter", True)
    for key, default in {"prescale_gradients": False, "gradient_predivide_factor": 1.0}.items():
        if scattered and profile.get(key, default) != default:
            text = f'`{key}`: needs `zero_optimization` with "reduce_scatter": false. Write that, or remove it here'
            yield key, text
    if (
        isinstance(offload := section.get("offload_optimizer"), Mapping)
        and offload.get("device") == "nvme"
    ):
        text = '`offload_optimizer`: checkpoints cannot hold states that are on a disk. Write "device": "cpu"'
        yield "offload_optimizer", text


def contradictions(profile: Profile, recipe: Recipe) -> Complaints:
    """Batch, clipping and precision must be missing, `auto`, or equal to the recipe's."""
    training = recipe.training
    micro_batch = training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH)
    processes = max(world_size(), read_parallelism(training).sharing_rows)
    steps = micro_batches_per_step(recipe, processes)
    rows = groups_of_rows(training, processes) * micro_batch * steps
    in_steps = "training.gradient_accumulation_steps"
    if recipe.budget.global_batch_tokens is not None:
        in_steps = "budget.global_batch_tokens"
    ours: list[tuple[str, str, object]] = [
        ("train_micro_batch_size_per_gpu", "training.per_device_train_batch_size", micro_batch),
        ("gradient_accumulation_steps", in_steps, steps),
        ("train_batch_size", f"{in_steps} with {processes} process(es)", rows),
        (
            "gradient_clipping",
            "training.max_grad_norm",
            training.get("max_grad_norm", DEFAULT_MAX_GRAD_NORM),
        ),
    ]
    for key, name, value in ours:
        if profile.get(key, "auto") not in ("auto", value):
            text = f"`{key}` is {profile[key]}, but the recipe's `{name}` means {value}"
            yield key, f'{text}. Write "auto"'
    for precision in ("bf16", "fp16"):
        block = profile.get(precision, "auto")
        is_required = bool(training.get(precision))
        enabled = block.get("enabled", False) if isinstance(block, Mapping) else block
        if enabled not in ("auto", is_required):
            ours_is = f"`training.{precision}` is {json.dumps(is_required)}"
            yield (
                precision,
                f'`{precision}.enabled` is {json.dumps(enabled)}, but {ours_is}. Write "auto"',
            )
    amp = profile.get("amp")
    if isinstance(amp, Mapping) and amp.get("enabled") is True:
        yield (
            "amp",
            "`amp.enabled` is true: write `training.bf16: true` in the recipe, and remove `amp` here",
        )


def optimizer_contradictions(profile: Profile, recipe: Recipe) -> Complaints:
    """`optimizer` is replaced by the recipe's: its numbers must be `auto`, or equal to the recipe's."""
    section = profile.get("optimizer")
    ours = recipe.optimizer
    if not isinstance(section, Mapping):
        return
    kind = str(section.get("type", ours.name))
    if kind.lower() != ours.name and not (kind.lower() in ADAM and "adamw" in ours.name):
        yield (
            "optimizer",
            f"`optimizer.type` is {kind}, but `optimizer.name` is {ours.name} in the recipe. Remove `optimizer` here",
        )
        return
    parameters = inspect.signature(find_optimizer(ours.name)).parameters.items()
    values = {name: parameter.default for name, parameter in parameters} | ours.options
    values |= {"lr": ours.learning_rate, "adam_w_mode": True}
    names = {"lr": "learning_rate"}
    for key, value in (section.get("params") or {}).items():
        theirs = list(value) if isinstance(value, list | tuple) else value
        expected = values.get(key, theirs)
        expected = list(expected) if isinstance(expected, list | tuple) else expected
        if theirs not in ("auto", expected):
            text = f"`optimizer.params.{key}` is {value}, but `optimizer.{names.get(key, key)}` is {expected}"
            yield key, f'{text} in the recipe. Write "auto", or remove `optimizer` here'


def scheduler_contradictions(profile: Profile, recipe: Recipe) -> Complaints:
    """`scheduler` is replaced by the recipe's `schedule`, which counts tokens: numbers of steps must be `auto`."""
    section = profile.get("scheduler")
    if not isinstance(section, Mapping):
        return
    equal: dict[str, float | None] = {
        "last_batch_iteration": -1,
        "warmup_min_lr": 0,
        "warmup_max_lr": recipe.optimizer.learning_rate,
    }
    for key, value in (section.get("params") or {}).items():
        if not isinstance(value, int | float) or value == equal.get(key):
            continue
        text = f"`scheduler.params.{key}` is {value}, but the recipe's `schedule` is used"
        yield key, f'{text}. Write the number there, and "auto" here, or remove `scheduler`'


def offloads(profile: Profile, part: str) -> bool:
    """True if `part` (`optimizer` or `param`) is in host memory."""
    section = zero_section(profile).get(f"offload_{part}")
    return isinstance(section, Mapping) and section.get("device", "none") != "none"


def zero_section(profile: Profile) -> Mapping[str, Any]:
    section = profile.get("zero_optimization")
    if isinstance(section, Mapping):
        return section
    return {}


def fsdp_config(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with Hugging Face's names without prefix."""
    fsdp_config = read_mapping(training.get("fsdp_config") or {}, CONFIG)
    return {str(key).removeprefix("fsdp_"): value for key, value in fsdp_config.items()}


def check_fsdp(recipe: Recipe, *, on_this_machine: bool = True) -> list[str]:
    """Return all complaints, each with key and remedy; empty without FSDP.

    Args:
        on_this_machine: the run is for this machine, not planned for another.
    """
    training = recipe.training
    if not training.get("fsdp"):
        if training.get("fsdp_config") and on_this_machine:
            return [f"{CONFIG} needs `training.fsdp: true`. Add that, or remove it."]
        return []
    wrong = [*wrong_keys(training), *refused_with_fsdp(recipe)]
    offloads_weights = fsdp_config(training).get("cpu_offload") and not training.get("bf16")
    if on_this_machine and offloads_weights and not torch.accelerator.is_available():
        wrong.append(f"{CONFIG}: `cpu_offload` needs a GPU. Remove it.")
    if on_this_machine and training.get("use_cpu") and torch.cuda.is_available():
        wrong.append(
            f"`training.use_cpu` with {KEY}: torch shards onto GPUs. Set CUDA_VISIBLE_DEVICES=, or remove it."
        )
    return wrong


def wrong_keys(training: Mapping[str, Any]) -> Iterator[str]:
    if training["fsdp"] is not True:
        yield (
            f"{KEY}: expected true, got `{training['fsdp']}`, a value of FSDP 1. Write `fsdp: true`, and in"
            f" {CONFIG} `reshard_after_forward: false` for shard_grad_op, `cpu_offload: true` for offload."
        )
    config = fsdp_config(training)
    if str(config.get("version", 2)) != "2":
        yield f"{CONFIG}: `version: {config['version']}`: only FSDP2 is supported. Write `version: 2`, or remove it."
    for key in config:
        if key in ELSEWHERE:
            yield f"{CONFIG}: `{key}` is not used: {ELSEWHERE[key]}. Remove it."
        elif key not in FSDP_KEYS:
            yield f"{CONFIG}: unknown key `{key}`.{did_you_mean(key, FSDP_KEYS)} Keys: {', '.join(FSDP_KEYS)}."
    if not isinstance(config.get("reshard_after_forward", True), bool):
        yield f"{CONFIG}: `reshard_after_forward` must be true (as in ZeRO-3) or false (as in ZeRO-2)."
    if bool(config.get("min_num_params")) != (
        str(config.get("auto_wrap_policy", "")).upper() == "SIZE_BASED_WRAP"
    ):
        yield f"{CONFIG}: `min_num_params` and `auto_wrap_policy: SIZE_BASED_WRAP`: set both, or neither."


def refused_with_fsdp(recipe: Recipe) -> Iterator[str]:
    """Yield what the recipe asks for that FSDP cannot do, each with its remedy."""
    training = recipe.training
    name = recipe.optimizer.name
    if facts_of(name).needs_whole_parameters:
        yield f"`optimizer.name`: `{name}` needs whole parameters. Use adamw, or remove {KEY}."
    elif recipe.model.dtype in ("bfloat16", "float16"):
        yield (
            f"`model.dtype: {recipe.model.dtype}`: FSDP keeps fp32 weights and computes with copies in half precision."
            " Remove it, and write `training.bf16: true`."
        )
    if recipe.optimizer.options.get("release_gradients"):
        yield f"`optimizer.release_gradients`: FSDP first sums gradients. Write false, or remove {KEY}."
    if training.get("fp16"):
        yield f"`training.fp16` with {KEY}: its loss scale is not supported. Write `bf16: true`, or use DeepSpeed."
    if (recipe.model.lora or {}).get("quantize"):
        yield f"`model.lora.quantize`: FSDP cannot shard quantized weights. Remove {KEY}."
    if recipe.stage in STAGES_THAT_GENERATE:
        yield f"`stage: {recipe.stage}` with {KEY} would gather the model for each token. Use a DeepSpeed profile."
