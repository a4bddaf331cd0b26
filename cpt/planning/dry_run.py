"""Run a model on fake tensors, which have shapes but use no memory, and add up the storages of a whole step."""

import warnings
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.fx.node import map_aggregate
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask, sdpa_mask

from cpt.hf_internals import supports_sdpa, without_zero3
from cpt.models.adapters import add_lora, quantization_of
from cpt.models.attention import VARLEN, computing_dtype
from cpt.models.families import register_families
from cpt.models.freezing import freeze_others
from cpt.models.fused_loss import FusedLoss, why_not_fused
from cpt.models.layers import keep_attention
from cpt.optim.adamw import OneKernelAdamW
from cpt.optim.build import build_optimizer
from cpt.optim.gradients import RELEASING, ReleasedGradients
from cpt.planning.workload import Setup
from cpt.recipe.schema import Optimizer
from cpt.torch_internals import TorchDispatchMode, fake_tensors

BASE_LAYER = ".base_layer"  # the end of peft's name of an adapted layer
STAND_IN = "cpt_planned"


class PeakOfStorages(TorchDispatchMode):
    """Measures peak bytes of all storages that operations return, real or fake."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = 0
        self.peak = 0

    def ignore(self, storage: torch.UntypedStorage) -> None:
        self.now -= self.alive.get(id(storage), (None, 0))[1]
        self.alive[id(storage)] = (weakref.ref(storage), 0)

    def ignore_weights(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            self.ignore(tensor.untyped_storage())

    def watch(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        known = self.alive.get(key)
        if known is not None and known[0]() is storage:
            return
        size = storage.nbytes()
        self.alive[key] = (weakref.ref(storage, lambda _: self.gone(key, size)), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def gone(self, key: int, size: int) -> None:
        self.alive.pop(key, None)
        self.now -= size

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        result = function(*arguments, **(options or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf.untyped_storage())
        return result


def tree_leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(tree, leaves.append)
    return leaves


def with_leaves(tree: Any, leaves: Iterable[Any]) -> Any:
    remaining = iter(leaves)
    return map_aggregate(tree, lambda _: next(remaining))


def drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def dry_run(config: PreTrainedConfig, setup: Setup) -> int:
    """Return peak bytes of weights, gradients, optimizer, activations and logits, in the second of two fake steps.

    In the second step the optimizer's states exist from the beginning. Under DeepSpeed or FSDP2, gradients are
    removed as they are computed, and neither they nor the optimizer's states are counted.
    """
    model = model_on_meta(config, setup)
    with fake_tensors():
        move_from_meta(model)
        if setup.checkpointing:
            keeps: dict[str, Any] = {"use_reentrant": False}
            if setup.recomputing.selective:
                keeps["context_fn"] = partial(
                    create_selective_checkpoint_contexts, keep_planned_attention
                )
            # the newer name is not in transformers 5.17
            with warnings.catch_warnings(action="ignore", category=FutureWarning):
                every = setup.recomputing.every_n_layers
                model.gradient_checkpointing_enable(
                    gradient_checkpointing_kwargs=keeps, every_n_layers=every
                )
            model.disable_input_require_grads()  # that of adapters stays
        if setup.fused_loss and why_not_fused(model) is None:
            FusedLoss(model)
        optimizer = None
        if setup.zero is None:
            options: dict[str, Any] = {} if setup.rounding is None else {"rounding": setup.rounding}
            name = (
                setup.optimizer if setup.optimizer in RELEASING else "adamw"
            )  # the others need as much as AdamW
            optimizer = build_optimizer(Optimizer(name=name, **options), model)
            if setup.releases:
                ReleasedGradients(optimizer)
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
                    ignore_pages(storages, optimizer)
        return storages.peak


def ignore_pages(storages: PeakOfStorages, optimizer: torch.optim.Optimizer) -> None:
    """Do not count states on the host."""
    if isinstance(optimizer, OneKernelAdamW):
        for arena in optimizer.arenas.values():
            storages.ignore(arena.untyped_storage())


def watch_weights(storages: PeakOfStorages, model: nn.Module, setup: Setup) -> None:
    """Count the memory before the first step; frozen layers of quantized models count as quantized."""
    how = quantization_of(setup.lora)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if how is not None and name.endswith(f"{BASE_LAYER}.weight"):
            storages.ignore(tensor.untyped_storage())
            storages.now += round(how.bytes_per_weight * tensor.numel())
        else:
            storages.watch(tensor.untyped_storage())


def model_on_meta(config: PreTrainedConfig, setup: Setup) -> PreTrainedModel:
    """Build the run's model, including adapters, without weights."""
    register_families()
    config = type(config).from_dict(config.to_dict())
    config.use_cache = False
    dtype = torch.bfloat16 if setup.weights_bytes == 2 else torch.float32
    with without_zero3(), torch.device("meta"):
        model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
        attention = setup.attention if supports_sdpa(model_class) else "eager"
        if attention == VARLEN and setup.on_cpu:
            attention = "sdpa"  # which saves at least as much
        elif attention.startswith(("flash", "sdpa", VARLEN)) and not setup.on_cpu:
            # a replacement that saves the same as GPU kernels, which cannot run on fake tensors
            attention, with_mask = STAND_IN, attention == "sdpa" and setup.packed
            AttentionInterface.register(STAND_IN, planned_attention)
            AttentionMaskInterface.register(
                STAND_IN, sdpa_mask if with_mask else flash_attention_mask
            )
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if setup.lora is not None:
            add_lora(model, setup.lora)  # puts the adapters into the model's own layers
        elif setup.train_only is not None:
            freeze_others(model, setup.train_only)
    model.train()
    return model


def move_from_meta(model: nn.Module) -> None:
    """In a FakeTensorMode, replace meta tensors, which autocast would skip; tied weights stay tied."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            fake = nn.Parameter(
                torch.empty_like(parameter, device="cpu"), requires_grad=parameter.requires_grad
            )
            setattr(
                module, name, moved.setdefault(id(parameter), fake)
            )  # torch's LSTM updates its own list
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(
                module, name, moved.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))
            )


def fake_row(setup: Setup, rows: int = 1) -> dict[str, torch.Tensor]:
    """The model's inputs; positions only if documents share a row, since these need a mask."""
    ids = torch.zeros((rows, setup.length), dtype=torch.long)
    return {"input_ids": ids} | ({"position_ids": torch.zeros_like(ids)} if setup.packed else {})


def computing_as(setup: Setup) -> torch.autocast:
    """Return autocast, enabled if fp32 weights or adapters compute in half precision."""
    mixed = (
        setup.half and (setup.weights_bytes == 4 or setup.lora is not None) and setup.zero is None
    )
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=mixed)


def empty_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flash kernels' outputs: [rows, tokens, heads, head dimension], and an fp32 number per head and token.

    Queries, keys and values are [rows, heads, tokens, head dimension].
    """
    output = queries.new_empty(
        queries.shape[0], queries.shape[2], queries.shape[1], values.shape[-1]
    )
    return output, queries.new_empty(queries.shape[:-1], dtype=torch.float32)


def empty_gradients(gradient: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in saved[:3])


def differentiate(
    ctx: Any, gradient: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    queries, keys, values, _, output, sums = ctx.saved_tensors
    return *stand_in_backward(gradient, queries, keys, values, output, sums), None


stand_in = torch.library.custom_op("cpt::planned_attention", empty_attention, mutates_args=())
stand_in_backward = torch.library.custom_op(
    "cpt::planned_attention_backward",
    empty_gradients,
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor output, Tensor sums) -> (Tensor, Tensor, Tensor)",
)
stand_in.register_fake(empty_attention)
stand_in_backward.register_fake(empty_gradients)
# saves the same as flash kernels: queries, keys, values, mask and outputs
stand_in.register_autograd(
    differentiate, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output)
)


def planned_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers. With a mask, sdpa repeats keys and values and casts the mask."""
    dtype = computing_dtype(query, key, value)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    if attention_mask is not None:
        repeats = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
        attention_mask = attention_mask.to(query.dtype)
    return stand_in(query, key, value, attention_mask)[0], None


def keep_planned_attention(
    context: Any, operation: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    """The checkpoint policy of `selective`, extended to the replacement."""
    if operation is torch.ops.cpt.planned_attention.default:
        return CheckpointPolicy.MUST_SAVE
    return keep_attention(context, operation)
