"""What `accelerate launch` says of FSDP, held against the recipe: the recipe decides, and a launch that says otherwise
is refused."""

import os
from collections.abc import Mapping
from typing import Any

from cpt.errors import LaunchError

ON = ("1", "true", "yes", "y", "on", "t")
OF_ACCELERATE = {  # variable of accelerate's launcher -> (key of `training.fsdp_config`, its default)
    "FSDP_VERSION": ("version", "2"),
    "FSDP_RESHARD_AFTER_FORWARD": ("reshard_after_forward", "true"),
    "FSDP_OFFLOAD_PARAMS": ("cpu_offload", "false"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("activation_checkpointing", "false"),
}


def agree_on_fsdp(training: Mapping[str, Any]) -> None:
    """See that accelerate was not started with another FSDP than the recipe's, or with DeepSpeed beside it.

    Raises:
        LaunchError: they contradict each other.
    """
    wanted = bool(training.get("fsdp"))
    if wanted and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise LaunchError(
            "the recipe has `training.fsdp`, and accelerate was started with DeepSpeed. Keep one: take `fsdp` out of"
            " the recipe, or start with `distributed_type: MULTI_GPU` (or torchrun), for the recipe alone says how"
            " FSDP shards."
        )
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() not in ON:
        return
    if not wanted:
        raise LaunchError(
            "accelerate was started with FSDP, which the recipe does not ask for. Write `training: {fsdp: true}` into"
            " the recipe, or `distributed_type: MULTI_GPU` into accelerate's config."
        )
    config = training.get("fsdp_config") or {}
    said = {key.removeprefix("fsdp_"): value for key, value in config.items()} if isinstance(config, Mapping) else {}
    for variable, (key, default) in OF_ACCELERATE.items():
        of_launch = os.environ.get(variable)
        of_recipe = said.get(key, default)
        if of_launch is not None and as_word(of_launch) != as_word(of_recipe):
            raise LaunchError(
                f"accelerate was started with {variable} {of_launch}, and the recipe's `training.fsdp_config.{key}` is"
                f" {of_recipe}. Write the same into both, or `distributed_type: MULTI_GPU` into accelerate's config:"
                " the recipe alone is enough."
            )


def as_word(value: Any) -> str:
    """Yes and no in all their spellings; FSDP 1's names of what FSDP 2 asks by yes and no."""
    word = str(value).lower()
    if word in (*ON, "full_shard") and word != "1":
        return "true"
    return "false" if word in ("no", "n", "off", "f", "shard_grad_op") else word
