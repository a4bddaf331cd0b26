"""Attention that can be counted without a GPU: operators that keep what a GPU's kernels keep."""

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask, sdpa_mask

from cpt.models.attention import VARLEN, computing_dtype
from cpt.models.recomputing import keep_attention
from cpt.planning.setup import Setup

STAND_IN = "cpt_planned"


def attention_to_count(setup: Setup) -> str:
    """A stand-in for a GPU's kernels, which keeps what they keep: they cannot run on fake tensors of a CPU."""
    if setup.on_cpu or not setup.attention.startswith(("flash", "sdpa", VARLEN)):
        return "sdpa" if setup.attention == VARLEN else setup.attention  # on a CPU it keeps at most what sdpa keeps
    with_mask = setup.attention == "sdpa" and setup.packed
    AttentionInterface.register(STAND_IN, planned_attention)
    AttentionMaskInterface.register(STAND_IN, sdpa_mask if with_mask else flash_attention_mask)
    return STAND_IN


@torch.library.custom_op("cpt::planned_attention", mutates_args=())
def stand_in(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty tensors in the shapes that flash kernels return: output, and one fp32 number for each head and token.

    Shapes: [rows, heads, tokens, head dimension]; returns [rows, tokens, heads, head dimension].
    """
    output = queries.new_empty(queries.shape[0], queries.shape[2], queries.shape[1], values.shape[-1])
    return output, queries.new_empty(queries.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("cpt::planned_attention_backward", mutates_args=())
def stand_in_backward(
    gradient: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(queries), torch.empty_like(keys), torch.empty_like(values)


def keep_for_backward(ctx: Any, inputs: tuple[torch.Tensor | None, ...], output: tuple[torch.Tensor, ...]) -> None:
    """What flash kernels keep: queries, keys, values, mask and what they return."""
    ctx.save_for_backward(*inputs, *output)


def differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    queries, keys, values, _, output, sums = ctx.saved_tensors
    return *stand_in_backward(gradient, queries, keys, values, output, sums), None


stand_in.register_fake(stand_in._init_fn)
stand_in_backward.register_fake(stand_in_backward._init_fn)
stand_in.register_autograd(differentiate, setup_context=keep_for_backward)


def planned_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls an attention function. With a mask, sdpa repeats keys and values and casts the mask."""
    dtype = computing_dtype(query, key, value)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    if attention_mask is not None:
        repeats = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, repeats), repeat_kv(value, repeats)
        attention_mask = attention_mask.to(query.dtype)
    return stand_in(query, key, value, attention_mask)[0], None


def keep_planned_attention(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """The checkpoint policy of `selective`, for the stand-in too."""
    return (
        CheckpointPolicy.MUST_SAVE
        if operation is torch.ops.cpt.planned_attention.default
        else keep_attention(context, operation)
    )
