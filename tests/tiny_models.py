"""Tiny configs of every model family, models of them, and a tokenizer in memory."""

from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cpt.models.build import build_model
from cpt.recipe.schema import Model

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL}
TINY: dict[str, dict[str, Any]] = {
    "cpt-gpt2": {**GPT2, "vocab_size": 128, "unpadded_vocab_size": 97},
    "minimind2": {**SHAPE, "intermediate_size": 48},
    "minimind2_moe": {**SHAPE, "intermediate_size": 48},
    "minimind3": {**SHAPE, "intermediate_size": 48},
    "minimind3_moe": {**SHAPE, "moe_intermediate_size": 48},
    "gpt2": {**GPT2, "vocab_size": 97, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "llama": {**SHAPE, "intermediate_size": 48},
    "qwen2": {**SHAPE, "intermediate_size": 48, **SPECIAL},
    "qwen3": {**SHAPE, "intermediate_size": 48, "head_dim": 8, **SPECIAL},
    "qwen3_moe": {
        **SHAPE,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        **SPECIAL,
    },
    "nemotron": {**SHAPE, "intermediate_size": 48, **SPECIAL},
    "deepseek_v3": {
        **SHAPE | {"num_key_value_heads": 4},
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        **SPECIAL,
    },
    "nemotron_h": {
        "vocab_size": 96,
        "hidden_size": 32,
        "hybrid_override_pattern": "M-*-",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        **SPECIAL,
    },
}


def tiny_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A recipe's `model.config`."""
    return {"model_type": model_type, **TINY[model_type], **changes}


def tiny_model(
    family: str | dict[str, Any], *, seed: int = 1, num_tokens: int = 96, packed: bool = False, **section: Any
) -> Any:
    """A model from scratch: of a family, or of a whole config; the rest are keys of `model:`."""
    config = tiny_config(family) if isinstance(family, str) else family
    recipe = Model(from_scratch=True, config=config, **section)
    return build_model(recipe, make_tokenizer(num_tokens), seed=seed, packed=packed)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=rtol, atol=atol, msg=name)


def make_tokenizer(num_tokens: int = 96) -> PreTrainedTokenizerFast:
    """A tokenizer of `num_tokens` words."""
    words = {"<unk>": 0, "<bos>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, num_tokens)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
    )
