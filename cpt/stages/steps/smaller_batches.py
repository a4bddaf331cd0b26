"""Where memory ends, go on with smaller micro-batches: the same rows in a step, from the same step."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from cpt.errors import ResourceError, RestartNeeded
from cpt.ranks import is_main_process, rank
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.safety.out_of_memory import (
    MemoryVote,
    OtherRankOutOfMemoryError,
    learned_micro_batch,
    remember_micro_batch,
    smaller_micro_batch,
)


class SmallerBatches(Trainer):
    """A Trainer that halves its micro-batch and doubles its accumulation, on all ranks together."""

    recipe: Recipe
    vote: MemoryVote | None = None
    is_updating = False
    """From the moment on when the optimizer may have changed weights."""

    @property
    def is_sharded(self) -> bool:
        """Whether an engine gathers and scatters within the step."""
        return bool(self.is_deepspeed_enabled or self.is_fsdp_enabled)

    def open_vote(self) -> None:
        """Ranks that meet only in the last backward can redo a step; sharded, or with buffers to share, they meet
        before."""
        arguments = self.args
        meets_once = not (self.is_sharded or arguments.ddp_broadcast_buffers or arguments.torch_compile)
        if (
            arguments.world_size > 1
            and meets_once
            and self.recipe.safety.on_oom == "split_batch"
            and self.vote is None
        ):
            self.vote = MemoryVote()
            model: Any = self.model
            model.register_forward_hook(self.ask_all)

    def begin_step(self) -> None:
        """Nothing of it is done yet."""
        self.is_updating = False
        if self.vote is not None:
            self.vote.has_voted = False

    def ask_all(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        """After the last forward of a step, and before DDP prepares for gradients to meet, learn whether a rank is out
        of memory.

        DDP, once prepared, could not forget this forward.
        """
        last = model.training and torch.is_grad_enabled() and self.accelerator.sync_gradients
        if last and self.vote is not None and self.vote.any_is_out(mine=False):
            raise OtherRankOutOfMemoryError("another process is out of memory")

    def make_smaller(self, problem: RuntimeError) -> None:
        """Halve the micro-batch, so that the step can be redone here or, where it cannot, by a restart.

        Raises:
            ResourceError: one row is all there is, or the recipe says abort.
            RestartNeeded: this process cannot know what of the step was done already: inside the update, once
            gradients of ranks began to
                meet, and always under DeepSpeed and FSDP, which leave a layer gathered where memory ends.
        """
        arguments, step = self.args, self.state.global_step + 1
        mine = not isinstance(problem, OtherRankOutOfMemoryError)
        redoes = not self.is_sharded and not self.is_updating and (arguments.world_size == 1 or self.vote is not None)
        if mine and self.vote is not None:
            redoes = redoes and not self.vote.has_voted
            if redoes:
                self.vote.any_is_out(mine=True)
        before = arguments.per_device_train_batch_size
        size = smaller_micro_batch(before) if self.recipe.safety.on_oom == "split_batch" else None
        if size is None:
            raise ResourceError(self.too_little_memory(step)) from problem
        if mine or is_main_process():
            remember_micro_batch(Path(str(arguments.output_dir)), arguments.world_size, size)
        how = "the step is redone" if redoes else "the run has to be started again, from its last checkpoint"
        message = (
            f"Out of memory in step {step} on process {rank()} with micro-batches of {before}: from now on {size}, and"
            f" {how}."
        )
        if mine:
            folder = Path(str(arguments.output_dir))
            record_event(
                folder, "out_of_memory", message, step=step, micro_batch=size, before=before, restart=not redoes
            )
        if not redoes:
            raise RestartNeeded(message) from problem
        arguments.gradient_accumulation_steps *= before // size
        arguments.per_device_train_batch_size = self._train_batch_size = self.state.train_batch_size = size

    def refuse_smaller_others(self, problem: RuntimeError) -> None:
        """An error may come from a process that left because its memory ended.

        Raises:
            RestartNeeded: one did.
        """
        arguments = self.args
        learned = learned_micro_batch(Path(str(arguments.output_dir)), arguments.world_size)
        if arguments.world_size > 1 and learned is not None and learned < arguments.per_device_train_batch_size:
            step = self.state.global_step + 1
            raise RestartNeeded(
                f"Another process ran out of memory in step {step}: with micro-batches of {learned} from now on, the"
                " run has to be started again, from its last checkpoint."
            ) from problem

    def too_little_memory(self, step: int) -> str:
        """What can be done, where smaller micro-batches cannot."""
        size = self.args.per_device_train_batch_size
        if size > 1:
            return (
                f"out of memory in step {step} with micro-batches of {size}, and `safety.on_oom` is abort. "
                "Set `training.per_device_train_batch_size` lower, or `safety.on_oom: split_batch`."
            )
        return (
            f"out of memory in step {step} with a single row of {self.recipe.data.sequence_length:,} tokens at a time."
            " Set `training.gradient_checkpointing: true`, `data.sequence_length` lower, or take a DeepSpeed profile"
            " that offloads."
        )
