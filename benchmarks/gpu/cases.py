"""What is trained: shapes of known models with random weights, and how many tokens of what at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SYSTEMS = {
    "bare": "a bare loop, compiled",
    "cpt": "cpt",
    "trainer": "Trainer",
    "liger": "Trainer + Liger",
    "expert": "Trainer + Liger + compile + fused",
}
ALL = tuple(SYSTEMS)
GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ONLY_THE_LOSS = {"fused_linear_cross_entropy": True, "rope": False, "rms_norm": False, "swiglu": False}  # layers are compiled, and fused so
FUSED_LOSS = {"use_liger_kernel": True, "liger_kernel_config": ONLY_THE_LOSS}
SELECTIVE = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": True}}


def llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool) -> dict[str, Any]:
    """Llama-3's config at a size."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": intermediate,
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": tied,
    }


LLAMA_1B = llama(2048, 16, 32, 8, 8192, tied=True)
LLAMA_3B = llama(3072, 28, 24, 8, 8192, tied=True)
LLAMA_8B = llama(4096, 32, 32, 8, 14336, tied=False)
QWEN_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151_936,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """One shape and one way to train it; what is not said here is the same for all systems."""

    name: str
    title: str
    config: Mapping[str, Any]
    tokens: int
    """Of a row."""
    rows: int
    """Of a micro-batch."""
    steps: int = 36
    systems: tuple[str, ...] = ALL
    packed: bool = False
    """Rows of several documents; the Trainer pads each document."""
    documents: int = 8
    """Documents that the Trainer takes at once in their place."""
    lora: Mapping[str, Any] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    """Of cpt's recipe, beside compiled layers."""
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "adamw"})
    checkpoints: bool = False
    """The Trainer computes activations again."""
    half_weights: bool = False
    """The Trainer's weights and moments are bfloat16, where fp32 ones have no room."""
    gib: float | None = None
    """A GPU's memory that the process is held to."""
    recipe: str | None = None
    """The shipped recipe whose way to train it has."""


CASES = {
    case.name: case
    for case in (
        Case(
            "A", "GPT-2 124M", {**GPT2, "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50_304, "n_positions": 1024}, 1024, 32, 50
        ),
        Case("B", "Qwen2.5-0.5B", QWEN_HALF_B, 4096, 8, 50, training=FUSED_LOSS),
        Case("C", "Llama-3.2-1B", LLAMA_1B, 4096, 8, training=FUSED_LOSS),
        Case("D", "Llama-3.2-1B, packed", LLAMA_1B, 8192, 4, systems=ALL[1:], packed=True, training=FUSED_LOSS),
        Case(
            "E",
            "Llama-3-8B, LoRA",
            LLAMA_8B,
            4096,
            2,
            systems=ALL[1:],
            lora={"r": 16, "lora_alpha": 32, "target_modules": "all-linear"},
            training={**FUSED_LOSS, **SELECTIVE},
            checkpoints=True,
        ),
        Case(
            "F",
            "Llama-3-8B, all parameters",
            LLAMA_8B,
            8192,
            2,
            systems=("cpt", "expert"),
            training={**FUSED_LOSS, **SELECTIVE},
            optimizer={"name": "adamw_8bit"},
            checkpoints=True,
            half_weights=True,
        ),
        Case(
            "G",
            "3B shape, all parameters, 24 GiB",
            LLAMA_3B,
            4096,
            2,
            systems=("cpt",),
            training={**FUSED_LOSS, "gradient_checkpointing": True},
            optimizer={"name": "adamw_8bit"},
            gib=24,
        ),
        Case(
            "H",
            "8B, all parameters, 24 GiB",
            LLAMA_8B,
            2048,
            2,
            systems=("cpt",),
            training={**FUSED_LOSS, "gradient_checkpointing": True, "max_grad_norm": 0},
            optimizer={"name": "paged_adamw_8bit", "rounding": "stochastic", "release_gradients": True},
            gib=24,
            recipe="recipes/prototype_rtx4090_64gb.yaml",
        ),
    )
}
PEAK_FLOPS, REACHED_BY_MATRICES = 989.4e12, 790e12  # of H100 and H200: bfloat16, dense; an 8192^3 product there


def tiny(case: Case) -> Case:
    """The same on a CPU in seconds: two narrow layers, short rows; all switches as they are."""
    if case.config["model_type"] == "gpt2":
        narrow = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 512}
    else:
        narrow = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
        narrow |= {"vocab_size": 512} | ({"head_dim": 8} if "head_dim" in case.config else {})
    return replace(case, config={**case.config, **narrow}, tokens=64, rows=2, steps=12, documents=3, gib=None)
