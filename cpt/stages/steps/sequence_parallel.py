"""Steps over rows that several processes share (DeepSpeed Ulysses): the same losses and gradients as on one process.

The Trainer's own way lets each process read rows of its own and hands them round. Under ZeRO-1 and 2 its gradients are
as many times too large as processes share a row, so that clipping cuts more, and it weighs all micro-batches alike,
however many labels they have. Here the loader gives the same rows to a group, and the losses' sum is divided by the
labels of the whole step, as without shared rows.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from cpt.data.rows.rows import IGNORED
from cpt.models.shared_rows import PartOfRows, attend_over_processes, check_shared_rows


class SharedRows(Trainer):
    """A Trainer whose processes share rows where `training.parallelism_config` says so; any other run passes through
    unchanged."""

    @property
    def sharing_rows(self) -> int:
        """How many processes train on the same rows, whatever they split."""
        config = self.args.parallelism_config
        return 1 if config is None else int(config.non_data_parallel_size)

    @property
    def parts_of_rows(self) -> int:
        """In how many parts rows are cut."""
        config = self.args.parallelism_config
        return 1 if config is None else int(config.sp_size)

    @property
    def part_of_rows(self) -> PartOfRows | None:
        """What cuts this process' part out of a micro-batch; None where rows stay whole."""
        parts = self.parts_of_rows
        return PartOfRows(self.args.process_index % parts, parts) if parts > 1 else None

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does; DeepSpeed learns which attention the model runs with, and is not given the loader."""
        if self.parts_of_rows == 1:
            super().create_accelerator_and_postprocess()
            return
        model: Any = self.config_of_model
        options: Any = self.args.parallelism_config
        check_shared_rows(model, self.parts_of_rows, model._attn_implementation)
        options.sp_handler.sp_attn_implementation = (
            model._attn_implementation
        )  # set here: accelerate's class takes few names
        super().create_accelerator_and_postprocess()
        accelerator: Any = self.accelerator
        accelerator.deepspeed_ulysses_dl_adapter = self.take_engine

    @property
    def config_of_model(self) -> Any:
        """transformers' own."""
        model: Any = self.model
        return model.config

    def take_engine(self, loader: DataLoader[Any], engine: Any) -> DataLoader[Any]:
        """In place of accelerate's own, which hands rows round: called when the engine is there, and before a
        checkpoint is loaded."""
        average_over_all(engine)
        attend_over_processes(self.config_of_model, self.args.per_device_train_batch_size, engine.seq_parallel_group)
        self.model_accepts_loss_kwargs = True
        return loader

    def get_sp_size(self) -> int:
        """1: the loader's length is in micro-batches of a group already."""
        return 1

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        """Rows of a step."""
        return int(super().get_total_train_batch_size(args) // self.parts_of_rows)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Labels of a step, of all processes."""
        if self.parts_of_rows == 1:
            return super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[no-any-return]
        count = sum((batch["shift_labels"] != IGNORED).sum() for batch in batch_samples)
        labels = torch.as_tensor(count, device=device)
        dist.all_reduce(labels)
        return labels

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The loss of this process' tokens, so that the mean over all processes is the step's."""
        if self.parts_of_rows == 1 or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss * self.args.world_size
        return (loss, outputs) if return_outputs else loss


def average_over_all(engine: Any) -> None:
    """Let the engine be that of ZeRO over all processes, as if they shared no rows: in gradients, and in the names of
    its files.

    By itself it averages over groups under ZeRO-1 and 2, and over all processes under ZeRO-3 (seen in 0.19).
    """
    engine.checkpoint_mp_rank = 0
    for owner in (engine, engine.optimizer):
        if "sequence_parallel_size" in vars(owner):
            owner.sequence_parallel_size = 1
