"""FSDP2 under the Trainer: each process keeps a part of every parameter and of its moments, and gathers a layer when
it is its turn."""

from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import Trainer


class FullySharded(Trainer):
    """A Trainer whose accelerator shards by `fully_shard` where `training.fsdp` says so, on the CPU too."""

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does, with gradients added up in fp32 and a loss that is not rounded."""
        super().create_accelerator_and_postprocess()
        if self.args.fsdp_plugin_args is None:
            return
        if not self.is_fsdp_enabled:
            shard_on_cpu(self.accelerator, self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True
        precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        if (
            precision is not None
        ):  # accelerate would also reduce in it, and round the model's outputs to it: the loss has 3 digits then
            policy = MixedPrecisionPolicy(param_dtype=precision, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Labels of a step, as a whole number: FSDP casts floats to what layers compute in, and 449 labels are 448 in
        bfloat16."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        return count.round().long() if self.is_fsdp_enabled and isinstance(count, torch.Tensor) else count

    def reshard(self) -> None:
        """Give up what was gathered: after a forward pass without a backward pass some modules still have whole
        parameters."""
        if self.is_fsdp_enabled:
            assert self.model is not None, "the Trainer was built with a model"
            give_up_gathered(self.model)


def give_up_gathered(model: nn.Module) -> None:
    """Every parameter is its own part again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard_on_cpu(accelerator: Any, options: dict[str, Any]) -> None:
    """Let accelerate shard over gloo: up to 1.15 it does so for devices only, though torch shards on the CPU as
    well."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    state = accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**options)
    state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
