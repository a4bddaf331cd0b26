"""Every process group waits as long as `training.ddp_timeout` says, those too that libraries make for themselves."""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class GroupTimeouts(TrainerCallback):
    """Sets the timeout of all groups when training begins, and again after the first step, for which some are made.

    DeepSpeed's groups would wait 30 minutes over gloo and 10 with NCCL, whatever the recipe says: a host that is lost
    in silence would hold the others for as long. torch has no public way to do this.
    """

    def __init__(self) -> None:
        self.is_first_step = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is in the hands of its engine."""
        set_timeouts(args)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step is done."""
        if self.is_first_step:
            self.is_first_step = False
            set_timeouts(args)


def set_timeouts(args: TrainingArguments) -> None:
    """Of all groups that this process is in."""
    for group in list(distributed_c10d._world.pg_map) if dist.is_initialized() else []:
        distributed_c10d._set_pg_timeout(args.ddp_timeout_delta, group)
