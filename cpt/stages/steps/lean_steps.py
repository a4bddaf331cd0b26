"""What the host does in each step, done once where it cannot have changed since the last: no module is walked, nothing
waits for a GPU."""

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate.optimizer
import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from cpt.data.rows.rows import IGNORED

# accelerate looks through the whole path of Python for this package, twice in each step.
accelerate.optimizer.is_lomo_available = functools.cache(accelerate.optimizer.is_lomo_available)


class ListeningCallbacks(CallbackHandler):
    """Calls those callbacks that have something to do at an event: most have not, at most events."""

    def __init__(self, handler: CallbackHandler) -> None:
        vars(self).update(vars(handler))
        self.listening: dict[str, tuple[list[TrainerCallback], list[TrainerCallback]]] = {}

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> TrainerControl:
        """As the Trainer's own, which calls all of them."""
        every = self.callbacks
        known, listening = self.listening.get(event, ([], []))
        if known != every:
            listening = [callback for callback in every if listens(callback, event)]
            self.listening[event] = list(every), listening
        if not listening:
            return control
        these = CallbackHandler.__new__(CallbackHandler)  # a callback may add or remove others meanwhile
        vars(these).update(vars(self), callbacks=listening)
        return these.call_event(event, args, state, control, **options)  # type: ignore[no-any-return]


def listens(callback: TrainerCallback, event: str) -> bool:
    """Whether it has its own method for an event, and not the one that does nothing."""
    method = getattr(callback, event)
    return getattr(method, "__func__", method) is not getattr(TrainerCallback, event)


class LeanSteps(Trainer):
    """A Trainer whose own part of a step is small: it shows where the host is the limit (small models, small
    micro-batches)."""

    _flops_of_token: float | None = None
    is_plain = False

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]
        """The Trainer's loop, while models know by themselves what the Trainer asks of them at each step."""
        if not isinstance(self.callback_handler, ListeningCallbacks):
            self.callback_handler = ListeningCallbacks(self.callback_handler)
        self.is_plain = self.only_needs_backward()
        model, inner = options["model"], self.model
        assert inner is not None, "the Trainer was built with a model"
        with (
            old_objects_set_apart(),
            without_walks(model, inner, zeroes=not (self.is_deepspeed_enabled or self.is_fsdp_enabled)),
        ):
            super()._run_epoch(**options)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Forward and backward pass of a micro-batch; what only other engines, devices and options ask for is left to
        the Trainer."""
        if not self.is_plain:
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        loss: Any = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            loss = loss / self.current_gradient_accumulation_steps
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    def only_needs_backward(self) -> bool:
        """Weights in their own precision or in autocast, on one device or under DDP, and nobody who changes how a step
        is made."""
        accelerator, optimizer = self.accelerator, self.optimizer
        engine = (
            self.is_deepspeed_enabled
            or self.is_fsdp_enabled
            or accelerator.scaler is not None
            or "backward" in vars(accelerator)
        )
        split = getattr(accelerator, "parallelism_config", None) is not None or self.args.n_gpu > 1
        says = getattr(self, "loss_is_scaled_for_ga", None) is not None or self.compute_loss_func is not None
        has_modes = callable(
            getattr(getattr(optimizer, "optimizer", None), "train", None)
        )  # schedule-free optimizers have
        return not (engine or split or says or has_modes or self.args.torch_empty_cache_steps is not None)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """The Trainer's own count, without counting the parameters at each micro-batch."""
        ids = inputs.get("input_ids")
        if not isinstance(ids, torch.Tensor) or not ids.numel():
            return super().floating_point_ops(inputs)
        if self._flops_of_token is None:
            self._flops_of_token = super().floating_point_ops(inputs) / ids.numel()
        return round(self._flops_of_token * ids.numel())

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Labels of a step that count, while they lie on the host; with several processes they add them up as the
        Trainer does."""
        counts = [labels_that_count(batch) for batch in batch_samples] if self.counts_here else [None]
        known = [count for count in counts if count is not None]
        if not known or len(known) < len(counts):
            return super()._get_num_items_in_batch(batch_samples, device)
        return sum(known)

    @property
    def counts_here(self) -> bool:
        """One process, one GPU, and a model that divides its loss by what it is told."""
        return (
            self.args.world_size == 1
            and self.args.n_gpu <= 1
            and self.model_accepts_loss_kwargs
            and self.compute_loss_func is None
        )

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """To the device, without waiting for the copy: the loader's memory is pinned."""
        device = self.args.device
        if (
            self.is_deepspeed_enabled
            or not all(isinstance(value, torch.Tensor | int) for value in inputs.values())
            or not inputs
        ):
            return super()._prepare_inputs(inputs)  # type: ignore[no-any-return]
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        if all(value.device == device for value in tensors.values()):
            return inputs
        return {**inputs, **{name: value.to(device, non_blocking=True) for name, value in tensors.items()}}


def labels_that_count(batch: Any) -> int | None:
    """Of a micro-batch with labels that the model shifts itself; None where they are elsewhere, or are none."""
    labels = batch.get("labels") if isinstance(batch, dict) and "shift_labels" not in batch else None
    if not isinstance(labels, torch.Tensor) or labels.device.type != "cpu":
        return None
    return int(np.count_nonzero(labels.numpy()[..., 1:] != IGNORED))


@contextmanager
def old_objects_set_apart() -> Iterator[None]:
    """What is there by now stays to the end: Python's garbage collector need not look through it again and again.

    It goes on collecting what the steps leave behind, which may hold memory of a GPU.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def without_walks(model: nn.Module, inner: nn.Module, *, zeroes: bool = True) -> Iterator[None]:
    """`model.train()` and `model.zero_grad()`, asked for at each step, without a walk through all modules.

    Args:
        model: what the Trainer calls, which may wrap `inner`.
        inner: the model itself, which evaluations put into their mode.
        zeroes: the gradients are those of the parameters that are there now: not an engine's, nor of others that FSDP2
            puts in their place.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def train(mode: bool = True) -> nn.Module:
        return model if mode and model.training and inner.training else type(model).train(model, mode)

    def zero_grad(set_to_none: bool = True) -> None:
        if not set_to_none:
            type(model).zero_grad(model, set_to_none=False)
        for parameter in parameters if set_to_none else ():
            parameter.grad = None

    # once through all: an adapter is made in training, around layers that `from_pretrained` left in evaluation
    model.train()
    quick = {"train": train, "zero_grad": zero_grad} if zeroes else {"train": train}
    vars(model).update(quick)
    try:
        yield
    finally:
        for name in quick:
            del vars(model)[name]
