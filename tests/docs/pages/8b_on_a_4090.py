"""Documents, and the config of Qwen3 8B with a small tokenizer and without weights."""

import json
from pathlib import Path

from guide_texts import manuals, write_base

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": False,
}


def prepare(folder: Path) -> None:
    """`corpus` and `Qwen/Qwen3-8B-Base`."""
    (folder / "corpus").mkdir()
    for name, passages in manuals(60).items():
        (folder / "corpus" / f"{name}.txt").write_text("\n\n".join(passages), encoding="utf-8")
    (folder / "Qwen").mkdir()
    base = write_base(folder / "Qwen" / "Qwen3-8B-Base")
    (base / "model.safetensors").unlink()
    (base / "config.json").write_text(json.dumps(QWEN3_8B), encoding="utf-8")
