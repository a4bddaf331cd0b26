"""The keys of `training:` that may say `auto`: the planner then chooses, for the machine that the run is on."""

from collections.abc import Mapping
from typing import Any

AUTO = "auto"
MICRO_BATCH = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
LOADING = ("dataloader_num_workers", "dataloader_prefetch_factor")
COMPILING = "torch_compile"
AUTOMATIC = (MICRO_BATCH, ACCUMULATION, *CHECKPOINTING, *LOADING, COMPILING)


def automatic_keys(training: Mapping[str, Any]) -> list[str]:
    """Those that say it."""
    return [key for key in AUTOMATIC if training.get(key) == AUTO]
