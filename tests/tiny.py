"""The smallest things that show behaviour: documents, a config of every model family, a recipe on disk."""

import json
import os
import random
from pathlib import Path
from typing import Any

import yaml

SENTENCE = "the model reads a document and learns which word comes after which other word in the text of its domain"
WORDS = SENTENCE.split()


def write_documents(path: Path, count: int, seed: int) -> Path:
    """JSONL of `count` documents of 5 to 120 words."""
    draw = random.Random(seed)
    lines = (
        json.dumps(
            {"text": " ".join(draw.choices(WORDS, k=draw.randint(5, 120))) + f" number {i}."}
        )
        for i in range(count)
    )
    path.write_text("\n".join(lines) + "\n")
    return path


TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}


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


class Planted:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.mark,)


def write_recipe(recipe: dict, path: Path) -> Path:
    """The sections as a YAML file."""
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path
