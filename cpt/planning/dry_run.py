"""A whole step on fake tensors, with every storage that is alive added up: what `cpt plan --exact` compares with."""

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedConfig

from cpt.models.adapters import BYTES_OF_4_BIT, quantization_of
from cpt.models.fused_loss import FusedLoss, why_not_fused
from cpt.optim.adamw import OneKernelAdamW
from cpt.optim.build import build_optimizer
from cpt.optim.gradients import RELEASING, ReleasedGradients
from cpt.planning.activations import computing_as, fake_row, model_on_meta, move_from_meta, quiet_fake_tensors
from cpt.planning.planned_attention import keep_planned_attention
from cpt.planning.setup import Setup
from cpt.planning.storages import PeakOfStorages, let_go
from cpt.recipe.schema import Optimizer

IN_4_BIT = ".base_layer.weight"  # peft's name of an adapted layer


@dataclass(frozen=True)
class DryRun:
    peak: int
    """Weights, gradients, optimizer, activations and logits at the moment that takes most."""
    weights: int


def dry_run(config: PreTrainedConfig, setup: Setup) -> DryRun:
    """Two steps on fake tensors, of which the second counts: the optimizer's states are there from its beginning.

    Under an engine, gradients leave as they are made, and neither they nor the optimizer's states are counted.
    """
    model = model_on_meta(config, setup)
    with quiet_fake_tensors(), FakeTensorMode(allow_non_fake_inputs=True):
        move_from_meta(model)
        if setup.checkpointing:
            keeps: dict[str, Any] = {"use_reentrant": False}
            if setup.recomputing.selective:
                keeps["context_fn"] = partial(create_selective_checkpoint_contexts, keep_planned_attention)
            # the newer name is not in transformers 5.17
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                every = setup.recomputing.every_n_layers
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=keeps, every_n_layers=every)
        if setup.fused_loss and why_not_fused(model) is None:
            FusedLoss(model)
        optimizer = optimizer_of(setup, model)
        row = fake_row(setup, setup.sequences)
        with PeakOfStorages() as storages:
            watch_weights(storages, model, setup)
            for _ in range(2):
                storages.peak = storages.now
                for _ in range(min(2, setup.accumulation)):
                    with computing_as(setup):
                        loss = model(**row, labels=row["input_ids"]).loss
                    loss.backward()
                if optimizer is not None:
                    optimizer.step()
                    optimizer.zero_grad()
                    leave_out_pages(storages, optimizer)
        return DryRun(storages.peak, sum(each.numel() * each.element_size() for each in model.parameters()))


def optimizer_of(setup: Setup, model: nn.Module) -> torch.optim.Optimizer | None:
    """The recipe's if it saves memory, else AdamW; None if an engine takes the gradients."""
    if setup.zero is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(let_go)
        return None
    options: dict[str, Any] = {} if setup.rounding is None else {"rounding": setup.rounding}
    name = setup.optimizer if setup.optimizer in RELEASING else "adamw"
    optimizer = build_optimizer(Optimizer(name=name, **options), model)
    if setup.releases:
        ReleasedGradients(optimizer)
    return optimizer


def watch_weights(storages: PeakOfStorages, model: nn.Module, setup: Setup) -> None:
    """Count what is there before the first step; frozen layers of 4-bit models count as 4 bit."""
    how = quantization_of(setup.lora)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if how is not None and name.endswith(IN_4_BIT):
            storages.ignore(tensor.untyped_storage())
            storages.now += round(BYTES_OF_4_BIT[how.double] * tensor.numel())
        else:
            storages.watch(tensor.untyped_storage())


def leave_out_pages(storages: PeakOfStorages, optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, OneKernelAdamW) and optimizer.arena is not None:
        storage = optimizer.arena.memory.untyped_storage()
        storages.now -= storages.alive[id(storage)][1]
        storages.ignore(storage)
