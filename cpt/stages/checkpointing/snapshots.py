"""One moment of a run, held still for a checkpoint: what the Trainer and DeepSpeed would write, put together and not
written."""

import os
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any

import psutil
import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from peft import PeftModel
from torch import nn
from transformers.utils import SAFE_WEIGHTS_NAME

from cpt.checkpoints.agreement import Agreement
from cpt.checkpoints.fsdp_parts import file_of_part, gathered_later, part_here
from cpt.checkpoints.read_back import saved_parameters
from cpt.checkpoints.snapshot import (
    HostCopies,
    changed_by_steps,
    copy_beside_training,
    memory_of,
    refuse_non_finite,
    tensors_in,
)
from cpt.checkpoints.transaction import Contents, Weights
from cpt.checkpoints.zero_parts import parts_of
from cpt.runs.events import record_event
from cpt.stages.checkpointing.resuming import ExactResume
from cpt.stages.checkpointing.trainer_states import progress, random_states, random_states_file

MOST_OF_THE_MEMORY = 0.8  # that copies may take of what the machine has free


class Snapshots(ExactResume):
    """The Trainer's saving, up to the point where it would write.

    Forward and backward pass only read what a checkpoint holds, but for buffers. So the copies of a save in the
    background are made beside the next step, and training waits for them where that step would first change something:
    in front of the optimizer.
    """

    snapshot: Contents | None = None
    """While one is taken: what would be written goes here."""
    copies_are_too_large = False

    @cached_property
    def agreement(self) -> Agreement:
        """How the processes agree on a save; made at the first use, by all of them."""
        return Agreement(self.args.ddp_timeout_delta)

    @cached_property
    def host_copies(self) -> HostCopies:
        """The memory of snapshots in the background."""
        return HostCopies()

    @cached_property
    def copied(self) -> Event:
        """Set where no copies are being made."""
        event = Event()
        event.set()
        return event

    def wait_for_copies(self, *_: Any) -> None:
        """Called before any optimizer's step."""
        self.copied.wait()

    @property
    def saved_model(self) -> nn.Module:
        """The model without what wraps it to train."""
        assert self.model is not None, "the Trainer was built with a model"
        return self.model

    def checkpoint_texts(self) -> dict[str, str]:
        """Small files beside the state, by name; asked on the main process for each full checkpoint."""
        return {}

    def take_snapshot(self, *, full: bool, beside_training: bool = False) -> Contents:
        """What this process has to write of this step; what processes do together happens here, or in `gather`.

        Args:
            full: with all that a run needs to go on; else the weights and the tokenizer.
            beside_training: the next step does not wait for the rest of the save.
        """
        taken = self.snapshot = Contents()
        nowhere = str(Path(str(self.args.output_dir)) / f"step-{self.state.global_step}")
        stage = None if self.zero_section is None else self.zero_section.get("stage")
        self.reshard()
        try:
            if stage == 3:
                self._save(nowhere, self.plan_gathering(taken, beside_training=beside_training))
            elif self.is_fsdp_enabled:
                taken.parts = gathered_later(self.saved_model, only_trained=isinstance(self.model, PeftModel))
                taken.gather = partial(taken.parts.put_together, self.agreement)
                self._save(nowhere)
            elif stage is not None:  # the Trainer copies the model, on every process
                self._save(nowhere, self.saved_model.state_dict())
            else:
                self.save_model(nowhere, _internal_call=True)
            if full:
                self._save_optimizer_and_scheduler(nowhere)
                self._save_scaler(nowhere)
                taken.states[random_states_file(self)] = random_states(self)
            if full and self.args.should_save:
                taken.texts |= {"trainer_state.json": progress(self), **self.checkpoint_texts()}
        finally:
            self.snapshot = None
        return taken

    def plan_gathering(self, taken: Contents, *, beside_training: bool) -> Weights | None:
        """How ZeRO-3's weights will be put together; what there is already: none, where only its parts are to be
        saved.

        DeepSpeed's way uses the connections and the parameters of the training, which has to wait for it.
        """
        engine: Any = self.model_wrapped
        of_adapter = isinstance(self.model, PeftModel)
        if not of_adapter and not engine.zero_gather_16bit_weights_on_model_save():
            return {}
        in_its_way: Callable[[], Weights | None] = partial(
            engine._zero3_consolidated_16bit_state_dict, exclude_frozen_parameters=of_adapter
        )
        taken.parts = parts_of(self.saved_model, only_trained=of_adapter) if beside_training else None
        if beside_training and taken.parts is None:
            return in_its_way()
        taken.gather = in_its_way if taken.parts is None else partial(taken.parts.put_together, self.agreement)
        return None

    def detach(self, taken: Contents) -> bool:
        """Copy what the next forward pass may change, and see that there is memory for the rest; False where training
        has to wait."""
        weights, parts = taken.weights, taken.parts
        if taken.write_model is not None and weights is None and parts is None:
            weights = self.saved_model.state_dict()
        changing = changed_by_steps(self.saved_model)
        copied = [
            taken.states,
            [tensor for tensor in tensors_in([weights, parts and parts.parts]) if memory_of(tensor) in changing],
        ]
        needed = self.host_copies.missing(copied) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if parts is not None and taken.write_model is not None:
            needed += parts.bytes_of_whole()
        if not all(self.agreement.gather(needed <= MOST_OF_THE_MEMORY * psutil.virtual_memory().available)):
            self.tell_too_large(needed)
            return False
        memory_of_buffers = {memory_of(buffer) for buffer in self.saved_model.buffers()}
        copy = partial(self.host_copies.copy, changing=lambda tensor: memory_of(tensor) in memory_of_buffers)
        taken.states, taken.weights = copy(taken.states), copy(weights)
        if parts is not None:
            parts.named = copy(parts.named)
        self.copied.clear()
        return True

    def copy_to_host(self, taken: Contents, moment: torch.Event | None) -> None:
        """Copy the rest, beside the training, and let its next update go on."""
        try:
            copy_beside_training(moment)
            changing = changed_by_steps(self.saved_model)
            copy = partial(self.host_copies.copy, changing=lambda tensor: memory_of(tensor) in changing)
            taken.states, taken.weights = self.host_copies.copy(taken.states), copy(taken.weights)
            if taken.parts is not None:
                taken.parts.parts = copy(taken.parts.parts)
        finally:
            self.copied.set()

    def tell_too_large(self, needed: int) -> None:
        """Once."""
        if self.args.should_save and not self.copies_are_too_large:
            size = f"{needed / 2**30:.1f} GiB"
            message = (
                f"Copies of what a checkpoint holds would take {size} of host memory, which is not free: training"
                " waits for saves."
            )
            record_event(Path(str(self.args.output_dir)), "saves_block", message, step=self.state.global_step)
        self.copies_are_too_large = True

    @property
    def changes_unasked(self) -> bool:
        """True where DeepSpeed keeps the optimizer's states on a disk, or steps by itself."""
        zero = self.zero_section or {}
        offload = zero.get("offload_optimizer", {})
        return offload.get("device") == "nvme" or bool(offload.get("super_offload")) or "zenflow" in zero

    # --- where the Trainer would write -------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """The model, its config and the tokenizer."""
        if self.snapshot is None:
            super()._save(output_dir, state_dict)
        elif self.args.should_save:
            self.snapshot.weights = state_dict
            self.snapshot.write_model = self.write_model_files
            self.snapshot.check = self.refuse_broken_weights
            self.snapshot.model_bytes = sum(
                numbers * parameter.element_size() for parameter, numbers in saved_parameters(self.saved_model)
            )

    def write_model_files(self, folder: Path, weights: Weights | None) -> None:
        """What `_save` writes; it empties what it is given."""
        super()._save(str(folder), None if weights is None else dict(weights))
        if weights == {}:  # ZeRO-3 was told not to gather them: a file of no weights would be taken for a model
            (folder / SAFE_WEIGHTS_NAME).unlink()

    def refuse_broken_weights(self, weights: Weights | None) -> None:
        """Only finite weights are published; frozen ones do not change."""
        trained = {
            name: parameter for name, parameter in self.saved_model.named_parameters() if parameter.requires_grad
        }
        if weights is None:
            refuse_non_finite(trained.items())
        else:
            refuse_non_finite((name, tensor) for name, tensor in weights.items() if name in trained)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Moments, master weights, schedule."""
        if self.snapshot is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        if self.is_deepspeed_enabled:
            self.keep_deepspeed(self.snapshot, output_dir)
        elif self.is_fsdp_enabled:
            part = part_here(self.saved_model, self.kernel)
            self.snapshot.states[file_of_part(self.args.process_index, self.args.world_size)] = part
        elif self.args.should_save:
            assert self.optimizer is not None, "the Trainer makes it before the first step"
            self.snapshot.states["optimizer.pt"] = self.optimizer.state_dict()
        of_deepspeed = self.is_deepspeed_enabled and isinstance(self.lr_scheduler, DeepSpeedSchedulerWrapper)
        if self.args.should_save and not of_deepspeed:
            assert self.lr_scheduler is not None, "the Trainer makes it before the first step"
            self.snapshot.states["scheduler.pt"] = self.lr_scheduler.state_dict()

    def keep_deepspeed(self, taken: Contents, folder: str) -> None:
        """What the engine saves, of this process."""
        from cpt.checkpoints.deepspeed_engine import LATEST, files_beside, kept_states, tag_of

        engine: Any = self.model_wrapped
        with kept_states(engine, Path(folder)) as kept:
            engine.save_checkpoint(
                folder, save_latest=False, exclude_frozen_parameters=isinstance(self.model, PeftModel)
            )
        taken.states |= kept.states
        taken.copies |= files_beside(engine, self.args.process_index)
        if self.args.should_save:
            taken.texts[LATEST] = tag_of(engine)

    def _save_scaler(self, output_dir: str) -> None:
        """The scale of fp16's gradients, where there is one."""
        if self.snapshot is None:
            super()._save_scaler(output_dir)
        elif self.args.should_save and self.accelerator.scaler is not None:
            self.snapshot.states["scaler.pt"] = self.accelerator.scaler.state_dict()
