"""Build a run's model on fake tensors, which have shapes but use no memory, and add up the storages in use."""

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.fx.node import map_aggregate
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
from cpt.models.adapters import add_lora
from cpt.models.attention import VARLEN, in_computing_dtype
from cpt.models.families import register_families
from cpt.models.freezing import freeze_others
from cpt.planning.workload import Setup
from cpt.torch_internals import TorchDispatchMode

BASE_LAYER = ".base_layer"  # the end of peft's name of an adapted layer
STAND_IN = "cpt_planned"


class PeakOfStorages(TorchDispatchMode):
    """Measures peak bytes of all storages that operations return, real or fake."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[weakref.ref[Any], int]] = {}  # storages and their bytes, by id
        self.now = 0
        self.peak = 0

    def ignore(self, storage: torch.UntypedStorage) -> None:
        _, size = self.alive.get(id(storage), (None, 0))
        self.now -= size
        self.alive[id(storage)] = (weakref.ref(storage), 0)

    def ignore_weights(self, module: nn.Module) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            self.ignore(tensor.untyped_storage())

    def watch(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self.alive:
            reference, _ = self.alive[key]
            if reference() is storage:
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
        output = function(*arguments, **(options or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self.watch(leaf.untyped_storage())
        return output


def tree_leaves(tree: Any) -> list[Any]:
    leaves: list[Any] = []
    map_aggregate(tree, leaves.append)
    return leaves


def drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


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
            has_mask = attention == "sdpa" and setup.packed
            mask = sdpa_mask if has_mask else flash_attention_mask
            attention = STAND_IN
            AttentionInterface.register(STAND_IN, planned_attention)
            AttentionMaskInterface.register(STAND_IN, mask)
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
            # torch's LSTM updates its own list
            setattr(module, name, moved.setdefault(id(parameter), fake))
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            empty = torch.empty_like(buffer, device="cpu")
            setattr(module, name, moved.setdefault(id(buffer), empty))


def fake_row(setup: Setup, rows: int = 1) -> dict[str, torch.Tensor]:
    """The model's inputs; positions only if documents share a row, since these need a mask."""
    ids = torch.zeros((rows, setup.length), dtype=torch.long)  # (B, T)
    inputs = {"input_ids": ids}
    if setup.packed:
        inputs["position_ids"] = torch.zeros_like(ids)
    return inputs


def computing_as(setup: Setup) -> torch.autocast:
    """Return autocast, enabled if fp32 weights or adapters compute in half precision."""
    has_fp32 = setup.weights_bytes == 4 or setup.lora is not None
    is_mixed = setup.half and has_fp32 and setup.zero is None
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_mixed)


def empty_attention(
    queries: torch.Tensor,  # (B, H, T, D)
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return flash kernels' outputs (B, T, H, D), and an fp32 number for each token and head (B, H, T)."""
    rows, heads, tokens, _ = queries.shape
    output = queries.new_empty(rows, tokens, heads, values.shape[-1])
    sums = queries.new_empty(rows, heads, tokens, dtype=torch.float32)
    return output, sums


def empty_gradients(gradient: torch.Tensor, *saved: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(tensor) for tensor in saved[:3])


def differentiate(
    ctx: Any, gradient: torch.Tensor, _: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    queries, keys, values, _, output, sums = ctx.saved_tensors
    gradients = stand_in_backward(gradient, queries, keys, values, output, sums)
    return *gradients, None


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
    query, key, value = in_computing_dtype(query, key, value)
    if attention_mask is not None:
        repeats = query.shape[1] // key.shape[1]
        key = repeat_kv(key, repeats)
        value = repeat_kv(value, repeats)
        attention_mask = attention_mask.to(query.dtype)
    output, _ = stand_in(query, key, value, attention_mask)
    return output, None
