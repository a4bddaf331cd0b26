"""`training.fsdp` and `training.fsdp_config` against what FSDP2 does here: what has no effect or would fail later is
refused."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from cpt.errors import RecipeError
from cpt.plugins import did_you_mean
from cpt.recipe.schema import Recipe

KEY, CONFIG = "`training.fsdp`", "`training.fsdp_config`"
KEYS = (
    "version",
    "reshard_after_forward",
    "cpu_offload",
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
)
ELSEWHERE = {
    "state_dict_type": "checkpoints hold the whole model and each process's own part, whatever it says",
    "activation_checkpointing": (
        "write `training.gradient_checkpointing: true`, which knows `selective`, `every_n_layers` and `offload`"
    ),
    "cpu_ram_efficient_loading": (
        "each process builds the model and keeps its part of it; ZeRO-3 (`training.deepspeed`) builds it in parts"
    ),
}
WHOLE_MATRICES = ("muon", "soap", "shampoo")
WHOLE_PARAMETERS = ("adamw_8bit", "paged_adamw_8bit")
STAGES_THAT_GENERATE = ("grpo", "rloo", "ppo", "spo", "gkd", "distill_on_policy")


def uses_fsdp(training: Mapping[str, Any]) -> bool:
    """Whether the recipe's `training:` section asks for it."""
    return bool(training.get("fsdp"))


def fsdp_config(training: Mapping[str, Any]) -> dict[str, Any]:
    """What it says, with Hugging Face's names without their prefix.

    Raises:
        RecipeError: a file that cannot be read.
    """
    given = training.get("fsdp_config") or {}
    if isinstance(given, str):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as problem:
            raise RecipeError(f"{CONFIG}: {given}: {problem}") from problem
    if not isinstance(given, dict):
        raise RecipeError(f"{CONFIG} is a mapping, or the path of a JSON file with one, not {given!r}.")
    return {str(key).removeprefix("fsdp_"): value for key, value in given.items()}


def check_fsdp(recipe: Recipe) -> list[str]:
    """Every complaint, each with its key and the remedy; none of a recipe without FSDP.

    Raises:
        RecipeError: the file of the config cannot be read.
    """
    training = recipe.training
    if not uses_fsdp(training):
        has_config = bool(training.get("fsdp_config"))
        return [f"{CONFIG} has no effect without `training.fsdp: true`. Write that, or remove it."] * has_config
    return [*wrong_on_any_machine(recipe), *wrong_on_this_machine(training)]


def refuse_for_any_machine(recipe: Recipe) -> None:
    """For a plan: what the recipe asks of FSDP has to be possible somewhere.

    Raises:
        RecipeError: it is not, with all complaints.
    """
    if uses_fsdp(recipe.training) and (complaints := wrong_on_any_machine(recipe)):
        raise RecipeError("\n".join(complaints))


def wrong_on_any_machine(recipe: Recipe) -> list[str]:
    return [*wrong_keys(recipe.training), *wrong_company(recipe)]


def wrong_on_this_machine(training: Mapping[str, Any]) -> Iterator[str]:
    if fsdp_config(training).get("cpu_offload") and not torch.accelerator.is_available() and not training.get("bf16"):
        yield f"{CONFIG}: `cpu_offload` is for weights that do not fit a GPU, and there is none here. Remove it."
    if training.get("use_cpu") and torch.cuda.is_available():
        yield (
            f"`training.use_cpu` with {KEY}: torch shards onto the GPUs that it sees. Hide them"
            " (CUDA_VISIBLE_DEVICES=), or remove it."
        )


def wrong_keys(training: Mapping[str, Any]) -> Iterator[str]:
    if training["fsdp"] is not True:
        yield (
            f"{KEY}: expected true, got `{training['fsdp']}`, which is FSDP 1's. Write `fsdp: true`, and the rest into"
            f" {CONFIG}: `reshard_after_forward: false` for shard_grad_op, `cpu_offload: true` for offload."
        )
    config = fsdp_config(training)
    if str(config.get("version", 2)) != "2":
        yield f"{CONFIG}: `version: {config['version']}`: only FSDP2 is supported. Write `version: 2`, or remove it."
    for key in config:
        if key in ELSEWHERE:
            yield f"{CONFIG}: `{key}` has no effect here: {ELSEWHERE[key]}. Remove it."
        elif key not in KEYS:
            yield f"{CONFIG}: no key called `{key}`.{did_you_mean(key, KEYS)} FSDP2 takes {', '.join(KEYS)}."
    if not isinstance(config.get("reshard_after_forward", True), bool):
        yield f"{CONFIG}: `reshard_after_forward` is true (as in ZeRO-3) or false (as in ZeRO-2)."
    if bool(config.get("min_num_params")) != (str(config.get("auto_wrap_policy", "")).upper() == "SIZE_BASED_WRAP"):
        yield f"{CONFIG}: `min_num_params` and `auto_wrap_policy: SIZE_BASED_WRAP`: give both, or neither."


def wrong_company(recipe: Recipe) -> Iterator[str]:
    """What does not go together with FSDP."""
    training, name = recipe.training, recipe.optimizer.name
    if name in (*WHOLE_MATRICES, *WHOLE_PARAMETERS):
        yield (
            f"`optimizer.name`: `{name}` needs whole parameters, and FSDP gives it some rows of each. Take adamw, or"
            f" leave {KEY} out."
        )
    elif recipe.model.dtype in ("bfloat16", "float16"):
        yield (
            f"`model.dtype: {recipe.model.dtype}`: FSDP keeps fp32 weights and computes with copies in half precision."
            " Leave it out, and write `training.bf16: true`."
        )
    if recipe.optimizer.options.get("release_gradients"):
        yield (
            "`optimizer.release_gradients`: FSDP adds gradients up over the processes before an update. Write false,"
            f" or leave {KEY} out."
        )
    if training.get("fp16"):
        yield (
            f"`training.fp16` with {KEY}: the scale of the loss is not watched over there. Write `bf16: true`, or take"
            " DeepSpeed."
        )
    if (recipe.model.lora or {}).get("quantize"):
        yield f"`model.lora.quantize`: FSDP cannot divide weights in 4 bit. They are small: leave {KEY} out."
    if recipe.stage in STAGES_THAT_GENERATE:
        yield (
            f"`stage: {recipe.stage}` with {KEY}: sampling would gather the model's parts for each token. Take a"
            " DeepSpeed profile: TRL gathers them once there."
        )
