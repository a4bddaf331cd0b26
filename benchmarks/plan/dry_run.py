"""Peak memory of a whole step on fake tensors, and the same by the plan's formula."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedConfig, PreTrainedModel

from cpt.models.adapters import quantization_of
from cpt.models.fused_loss import FusedLoss, why_not_fused
from cpt.models.layers import keep_attention
from cpt.optim.build import OptimizerFacts, build_optimizer, facts_of
from cpt.optim.gradients import ReleasedGradients
from cpt.optim.groups import IS_EMBEDDING, ParameterGroups, parameter_groups
from cpt.planning.activations import ActivationCounts, count_activations
from cpt.planning.fake_model import (
    BASE_LAYER,
    PeakOfStorages,
    computing_as,
    drop_gradient,
    fake_row,
    model_on_meta,
    move_from_meta,
)
from cpt.planning.memory import BUCKETS, MOVED, sizes_for_stage, snapshots_of_run
from cpt.planning.model_sizes import ModelSizes
from cpt.planning.workload import Setup, Sharding
from cpt.recipe.schema import Optimizer
from cpt.torch_internals import fake_tensors


def dry_run(config: PreTrainedConfig, setup: Setup) -> int:
    """Return peak bytes of weights, gradients, optimizer, activations and logits, in the second of two fake steps.

    In the second step the optimizer's states exist from the beginning. Under DeepSpeed or FSDP2, gradients are
    removed as they are computed, and neither they nor the optimizer's states are counted.
    """
    model = model_on_meta(config, setup)
    with fake_tensors():
        move_from_meta(model)
        if setup.checkpointing:
            enable_checkpointing(model, setup)
        if setup.fused_loss and why_not_fused(model) is None:
            FusedLoss(model)

        optimizer = None
        if setup.zero is None:
            optimizer = build_planned_optimizer(model, setup)
        else:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(drop_gradient)

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
        return storages.peak


def enable_checkpointing(model: PreTrainedModel, setup: Setup) -> None:
    options: dict[str, Any] = {"use_reentrant": False}
    if setup.recomputing.selective:
        options["context_fn"] = partial(
            create_selective_checkpoint_contexts, keep_planned_attention
        )
    # the newer name is not in transformers 5.17
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs=options, every_n_layers=setup.recomputing.every_n_layers
        )
    model.disable_input_require_grads()  # that of adapters stays


def build_planned_optimizer(model: PreTrainedModel, setup: Setup) -> torch.optim.Optimizer:
    facts = facts_of(setup.optimizer)
    options: dict[str, Any] = {}
    if setup.optimizer != "adamw" and facts.moment_bytes is not None:
        groups = parameter_groups(model, embeddings_apart=facts.embeddings_apart)
        optimizer: torch.optim.Optimizer = PlannedStates(groups, facts)
    else:  # others need as much as adamw
        if setup.rounding is not None:
            options["rounding"] = setup.rounding
        optimizer = build_optimizer(Optimizer(**options), model)
    if setup.releases:
        ReleasedGradients(optimizer)
    return optimizer


class PlannedStates(torch.optim.Optimizer):
    """States as large as those of bitsandbytes, without its updates, which need a GPU."""

    def __init__(self, groups: ParameterGroups, facts: OptimizerFacts) -> None:
        super().__init__(groups, {})
        self.facts = facts
        self._step_supports_amp_scaling = True  # fake tensors have no values to decide by

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.facts.pages_states:
            return
        assert self.facts.moments is not None, "known of optimizers whose moments have known sizes"
        for group in self.param_groups:
            in_8_bit = self.facts.quantizes_moments and not group.get(IS_EMBEDDING, False)
            for parameter in group["params"]:
                if parameter.grad is None or self.state[parameter]:
                    continue
                for number in range(self.facts.moments):
                    dtype = torch.uint8 if in_8_bit else torch.float32
                    self.state[parameter][number] = torch.empty_like(parameter, dtype=dtype)


def watch_weights(storages: PeakOfStorages, model: nn.Module, setup: Setup) -> None:
    """Count the memory before the first step; frozen layers of quantized models count as quantized."""
    quantized = quantization_of(setup.lora)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if quantized is not None and name.endswith(f"{BASE_LAYER}.weight"):
            storages.ignore(tensor.untyped_storage())
            storages.now += round(quantized.bytes_per_weight * tensor.numel())
        else:
            storages.watch(tensor.untyped_storage())


def keep_planned_attention(
    context: Any, operation: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    """The checkpoint policy of `selective`, extended to the replacement."""
    if operation is torch.ops.cpt.planned_attention.default:
        return CheckpointPolicy.MUST_SAVE
    return keep_attention(context, operation)


def planned_bytes(config: PreTrainedConfig, setup: Setup) -> float:
    sizes = sizes_for_stage(config, setup)
    return bytes_of_one_process(sizes, setup, count_activations(config, setup))


def bytes_of_one_process(sizes: ModelSizes, setup: Setup, activations: ActivationCounts) -> float:
    """Return the planned peak of one process with all weights, without buffers of engines, kernels and libraries.

    Under an engine, also without gradients and optimizer, as `dry_run`.
    """
    single = replace(
        setup,
        gpus=1,
        zero=None if setup.zero is None else Sharding(2, offload_optimizer=True),
        recomputing=replace(setup.recomputing, offload=False),
    )
    peak_bytes = 0.0
    for moment in snapshots_of_run(sizes, single, activations):
        of_model = [term.size for term in moment.terms if term.name not in (MOVED, BUCKETS)]
        peak_bytes = max(peak_bytes, sum(of_model))
    return peak_bytes
