"""Refuse a launch that contradicts the recipe: the recipe decides."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import DeepSpeedPlugin

from cpt.errors import LaunchError
from cpt.installation import training_program
from cpt.parallelism import KEY
from cpt.ranks import world_size

log = logging.getLogger(__name__)
OTHER_STARTERS = {  # variable that a starter without torch's RANK sets -> what it is called
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def agree_with_launcher(training: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """Compare what the launcher left in the environment with the recipe's `training:` section.

    Returns:
        What `TrainingArguments.deepspeed` must be: from the recipe, or from accelerate's config.

    Raises:
        LaunchError: the processes do not know each other, or the launcher contradicts the recipe.
    """
    if world_size() > 1 and "RANK" not in os.environ:  # every process would be the main one
        raise LaunchError(
            f"WORLD_SIZE is {world_size()}, but RANK is not set. Use a launcher (torchrun, accelerate, deepspeed), or"
            " set both."
        )
    for variable, starter in OTHER_STARTERS.items():
        count = os.environ.get(variable, "1")
        if "RANK" not in os.environ and count.isdigit() and int(count) > 1:
            raise LaunchError(
                f"{starter} started {count} processes, but without RANK and WORLD_SIZE each of them would train alone."
                f" Start one launcher per host instead: torchrun --nnodes N --nproc_per_node M {training_program()}"
                " RECIPE"
            )
    check_precision(training)
    check_sharding(training)
    return agreed_deepspeed(training)


def check_precision(training: Mapping[str, Any]) -> None:
    """Refuse another precision: where the recipe names none, transformers would take accelerate's."""
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision == "fp8":
        raise LaunchError(
            "accelerate was started with mixed_precision fp8, which cpt has not been tested with. Start with"
            " `--mixed_precision bf16`, and write `training: {bf16: true}`."
        )
    if precision != "no" and not training.get(precision):
        raise LaunchError(
            f"accelerate was started with mixed_precision {precision}, which is not in the recipe. Write"
            f" `training: {{{precision}: true}}` into the recipe, or `mixed_precision: 'no'` into accelerate's config."
        )


def check_sharding(training: Mapping[str, Any]) -> None:
    """Refuse another engine than the recipe's; of FSDP's options the recipe's alone count, as under torchrun."""
    in_recipe = bool(training.get("fsdp"))
    if in_recipe and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        raise LaunchError(
            "the recipe has `training.fsdp`, and accelerate was started with DeepSpeed. Remove `fsdp` from the recipe,"
            " or start with `distributed_type: MULTI_GPU` or torchrun."
        )
    by_accelerate = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if by_accelerate and not in_recipe:
        raise LaunchError(
            "accelerate was started with FSDP, which is not in the recipe. Write `training: {fsdp: true}` into the"
            " recipe, or `distributed_type: MULTI_GPU` into accelerate's config."
        )
    if by_accelerate and (ignored := [name for name in os.environ if name.startswith("FSDP_")]):
        log.warning("%s of accelerate's config are ignored: `training.fsdp_config` decides.", ", ".join(ignored))
        for name in ignored:
            del os.environ[name]
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true":
        raise LaunchError(
            f"accelerate was started with `{KEY}` in its own config. Remove it there: the recipe's `training.{KEY}`"
            " decides."
        )


def agreed_deepspeed(training: Mapping[str, Any]) -> str | dict[str, Any] | None:
    """The DeepSpeed config of the recipe or of accelerate; both may have one only where they are equal."""
    from_recipe: str | dict[str, Any] | None = training.get("deepspeed")
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        return from_recipe
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    from_accelerate = file or config_of_accelerate()
    if from_recipe is not None and contents(from_recipe) != contents(from_accelerate):
        raise LaunchError(
            f"the recipe's `training.deepspeed` is {from_recipe}, but accelerate was started with"
            f" {file or 'the values in its own config'}, which differs. Remove `deepspeed` from the recipe, or"
            " `deepspeed_config` from accelerate's config."
        )
    return from_accelerate if from_recipe is None else from_recipe


def config_of_accelerate() -> dict[str, Any]:
    """The config that accelerate makes of `zero_stage` and the like; what it leaves open follows the recipe."""
    config: dict[str, Any] = DeepSpeedPlugin().deepspeed_config
    del config["steps_per_print"]  # infinite; the Trainer sets it again
    return {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "zero_force_ds_cpu_optimizer": False, **config}


def contents(config: str | dict[str, Any]) -> dict[str, Any]:
    """The config's content, from its file where it is a path."""
    if isinstance(config, dict):
        return config
    try:
        read: dict[str, Any] = json.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as problem:
        raise LaunchError(f"DeepSpeed config {config}: {problem}") from problem
    return read
