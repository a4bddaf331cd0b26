"""Activations that are computed again in the backward pass, or wait for it in the host's memory: the sub-keys of
`training.gradient_checkpointing_kwargs`, the same for every version of transformers.

`every_n_layers: 2` computes every second layer again. `selective: true` saves the outputs of attention, which cost
most to compute again and little to save. `offload: true` sends what is saved to pinned host memory.
"""

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

from cpt.distributed import tell
from cpt.errors import RecipeError
from cpt.models.compiled import has_experts, move_checkpoints_into_graphs, wanted_compiling
from cpt.plugins import did_you_mean

SWITCHES = ("gradient_checkpointing", "activation_checkpointing")  # transformers' name, and its new one
KEY = "`training.gradient_checkpointing_kwargs`"
OURS = ("selective", "every_n_layers", "offload")
TORCHS = ("use_reentrant", "preserve_rng_state", "determinism_check", "debug", "early_stop")
ATTENTION_OPERATIONS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
FLASH_ATTENTION = "flash_attn"  # its packages, and its kernels of the Hub, whose names end in a hash


@dataclass(frozen=True)
class Recomputing:
    checkpoints: bool = False
    selective: bool = False
    every_n_layers: int = 1
    offload: bool = False
    of_torch: Mapping[str, Any] = field(default_factory=dict)


def read_recomputing(training: Mapping[str, Any], *, zero3: bool = False, experts: bool = False) -> Recomputing:
    """Read and check the sub-keys of the recipe's section, or of the arguments made of it."""
    checkpoints = any(training.get(name) for name in SWITCHES)
    keys = [f"{name}_kwargs" for name in SWITCHES]
    given: Mapping[str, Any] = next((training[key] for key in keys if training.get(key)), {})
    for name in given:
        if name not in (*OURS, *TORCHS):
            raise RecipeError(
                f"{KEY}: `{name}` is not one of {', '.join(OURS)}.{did_you_mean(name, (*OURS, *TORCHS))}"
            )
    for name in ("selective", "offload"):
        if not isinstance(given.get(name, False), bool):
            raise RecipeError(f"{KEY}: `{name}` is true or false, not {given[name]!r}.")
    every = given.get("every_n_layers", 1)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise RecipeError(f"{KEY}: `every_n_layers` is a whole number from 1 on, not {every!r}.")
    if not checkpoints and (without_effect := [name for name in given if name != "offload"]):
        raise RecipeError(f"{KEY}: `{without_effect[0]}` needs `training.gradient_checkpointing: true`.")
    of_torch = {name: value for name, value in given.items() if name in TORCHS}
    found = Recomputing(checkpoints, given.get("selective", False), every, given.get("offload", False), of_torch)
    compiles = wanted_compiling(training) is not None
    if of_torch.get("use_reentrant") and (found.selective or compiles):
        raise RecipeError(f"{KEY}: `selective` and compiled layers do not work with `use_reentrant: true`. Remove it.")
    if found.selective and compiles and experts:
        raise RecipeError(f"{KEY}: `selective` does not work with `torch_compile` and experts. Remove one.")
    if found.offload and zero3 and (not found.checkpoints or found.every_n_layers > 1):
        # Gathered weights would go to the host, unless every layer is computed again.
        raise RecipeError(f"{KEY}: `offload` under ZeRO-3 needs `gradient_checkpointing` of every layer.")
    return found


def set_up_recomputing(model: nn.Module, arguments: TrainingArguments) -> AbstractContextManager[Any]:
    """Prepare the model, so that the Trainer's own switch turns on what the recipe asks for; returns the context of
    each forward and backward pass."""
    wanted = read_recomputing(vars(arguments), zero3=is_deepspeed_zero3_enabled(), experts=has_experts(model))
    if wanted.checkpoints:
        options = {"use_reentrant": False, **wanted.of_torch}  # torch's default is still the older kind
        if wanted.every_n_layers > 1:
            options["every_n_layers"] = wanted.every_n_layers
        for name in SWITCHES:
            if f"{name}_kwargs" in vars(arguments):
                setattr(arguments, f"{name}_kwargs", dict(options))
        whole = model.get_base_model() if isinstance(model, PeftModel) else model
        if isinstance(whole, PreTrainedModel):
            own_switch = whole.gradient_checkpointing_enable

            # A function cannot be in arguments that are written to files.
            def switch(gradient_checkpointing_kwargs: dict[str, Any] | None = None, **others: Any) -> None:
                given = dict(gradient_checkpointing_kwargs or {})
                if wanted.selective:
                    given["context_fn"] = partial(create_selective_checkpoint_contexts, keep_attention)
                # The warning is about the older name, which both versions know.
                with warnings.catch_warnings(action="ignore", category=FutureWarning):
                    own_switch(gradient_checkpointing_kwargs=given, **others)
                move_checkpoints_into_graphs(whole)

            whole.gradient_checkpointing_enable = switch  # type: ignore[method-assign]
    if not wanted.offload:
        return nullcontext()
    if not torch.accelerator.is_available():
        tell(f"{KEY}: `offload` does nothing here: without a GPU all activations are in the host's memory.")
        return nullcontext()
    return OffloadedActivations(model)


def keep_attention(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    """The policy: attention's outputs stay, all else is computed again."""
    name = operation.name().partition(".")[0]
    keeps = name in ATTENTION_OPERATIONS or FLASH_ATTENTION in name
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


class OffloadedActivations(AbstractContextManager[None]):
    """TRL's offloading, made at the first step: it has to know the weights, which then no longer move."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.context: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        if self.context is None:
            from trl.models.activation_offloading import get_act_offloading_ctx_manager  # seconds to import

            self.context = get_act_offloading_ctx_manager(self.model)
        self.context.__enter__()

    def __exit__(self, *problem: Any) -> None:
        assert self.context is not None, "it was entered"
        self.context.__exit__(*problem)
