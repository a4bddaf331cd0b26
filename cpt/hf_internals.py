"""Every private name of transformers, TRL, peft, accelerate and the libraries around them that cpt uses, with its
reason; `USED` is the contract that a test checks.

Read in transformers 5.17 and 5.23, TRL 1.12, peft 0.21, accelerate 1.15.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed, is_deepspeed_zero3_enabled
from transformers.modeling_flash_attention_utils import _flash_attention_forward

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "transformers.PreTrainedModel._supports_sdpa": ("", "which attention a family has", "a public list of them"),
    "transformers.PreTrainedModel._supports_flash_attn": ("", "which attention a family has", "a public list of them"),
    "transformers.PreTrainedModel._supports_flex_attn": ("", "which attention a family has", "a public list of them"),
    "transformers.PreTrainedModel._can_set_experts_implementation": (
        "",
        "it searches the file of a class for a decorator, which experts from another file do not need",
        "a public flag",
    ),
    "transformers.PreTrainedConfig._attn_implementation": ("", "which attention a model runs with", "a public getter"),
    "transformers.modeling_flash_attention_utils._flash_attention_forward": (
        "query_states, key_states, value_states, attention_mask, query_length, is_causal, softmax_scale, "
        "sliding_window, attn_implementation, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k",
        "call flash-attn with the bounds of documents",
        "torch's varlen_attn as fast as flash-attn 3 on Hopper",
    ),
    "transformers.integrations.deepspeed._hf_deepspeed_config_weak_ref": (
        "",
        "put DeepSpeed's config back after a model was built without ZeRO-3",
        "a public function that returns the object and not its dict",
    ),
}


def supports_sdpa(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """True where the family of this model has torch's fused attention."""
    return bool(model._supports_sdpa)


def supports_flash(model: type[PreTrainedModel]) -> bool:
    return bool(model._supports_flash_attn)


def supports_flex(model: type[PreTrainedModel]) -> bool:
    return bool(model._supports_flex_attn)


class SettableExperts:
    """Mixin of models whose experts have transformers' decorator in another file."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


def attention_of(config: PreTrainedConfig) -> str:
    """The attention implementation of a built model, by its name in transformers."""
    return str(config._attn_implementation)


def flash_attention(
    package: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The kernel of a flash-attn package, within the documents between `bounds`: [1, tokens, heads, width]."""
    documents: dict[str, Any] = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    output: torch.Tensor = _flash_attention_forward(
        query,
        key,
        value,
        None,
        query_length=query.shape[1],
        is_causal=True,
        softmax_scale=scale,
        sliding_window=window,
        attn_implementation=package,
        **documents,
    )
    return output


@contextmanager
def without_zero3() -> Iterator[None]:
    """Inside, transformers builds plain models although the run uses ZeRO-3."""
    if not is_deepspeed_zero3_enabled():
        yield
        return
    config = deepspeed._hf_deepspeed_config_weak_ref()  # type: ignore[misc]
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed.set_hf_deepspeed_config(config)
