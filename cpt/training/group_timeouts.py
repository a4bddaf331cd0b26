"""Give `training.ddp_timeout` to every process group, also to those that libraries make."""

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class GroupTimeouts(TrainerCallback):
    """Sets the timeout of all groups when training begins, and again after the first step, for which some are made.

    DeepSpeed's groups wait 30 minutes over gloo and 10 with NCCL, whatever the recipe says. torch has no public way to
    change that.
    """

    def __init__(self) -> None:
        self.is_first_step = True

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        set_timeouts(args)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.is_first_step:
            self.is_first_step = False
            set_timeouts(args)


def set_timeouts(args: TrainingArguments) -> None:
    for group in list(distributed_c10d._world.pg_map) if dist.is_initialized() else []:
        distributed_c10d._set_pg_timeout(args.ddp_timeout_delta, group)
