"""Which models are trained, by which systems, and how many tokens at a time."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

SYSTEMS = {
    "bare": "bare loop, compiled",
    "cpt": "cpt",
    "trainer": "Trainer",
    "liger": "Trainer + Liger",
    "expert": "Trainer as an expert sets it up",
}
ALL = tuple(SYSTEMS)
GPT2 = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GIB_OF_24GB_CARD = (
    22.7  # an RTX 4090 reports 23.6 GiB, and CUDA's context and libraries take up to 0.9
)


def llama(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool
) -> dict[str, Any]:
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
    """One model and one way to train it. What is not named here is the same for all systems."""

    name: str
    title: str
    config: Mapping[str, Any]
    tokens: int
    """Tokens of a row."""
    rows: int
    """Rows of a step; of a micro-batch too, unless the step is divided into `parts`."""
    steps: int = 38
    systems: tuple[str, ...] = ALL
    equal_parts: int = 1
    """Micro-batches of a step at which every system fits into 80 GB: memory is compared there."""
    first_parts: Mapping[str, int] = field(default_factory=dict)
    """Systems that cannot fit fewer micro-batches of a step into 80 GB, by calculation; all others start at 1."""
    packed: bool = False
    """Rows hold several documents."""
    documents: int = 8
    """Documents that the default Trainer takes at a time instead of packed rows, and pads."""
    lora: Mapping[str, Any] | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `training:` in cpt's recipe."""
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"name": "adamw"})
    model: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `model:` in cpt's recipe."""
    checkpoints: bool = False
    """The Trainer recomputes activations."""
    in_8_bit: bool = False
    """The Trainer's weights are bfloat16 and its moments 8-bit, because fp32 ones do not fit."""
    gib: float | None = None
    """GPU memory that the process may use."""
    is_traced: bool = False
    """Two of cpt's steps are saved as a trace."""
    evaluates: bool = False
    """cpt evaluates before the first step and after the last one."""

    @property
    def timed_steps(self) -> int:
        return min(20, self.steps - WARMUP - 2 * INSPECTED - 1 - TRACED)


WARMUP, INSPECTED, TRACED = 8, 3, 2
SMALL = {"gradient_checkpointing": True}
ON_24_GB: dict[str, Any] = {"steps": 30, "systems": ("cpt",), "gib": GIB_OF_24GB_CARD}
IN_8_BIT: dict[str, Any] = {"optimizer": {"name": "adamw_8bit"}, "model": {"dtype": "bfloat16"}}
FULL_8B: dict[str, Any] = {"systems": ("cpt", "expert"), "in_8_bit": True, **IN_8_BIT}
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
PAGED = {"name": "paged_adamw_8bit", "rounding": "stochastic", "release_gradients": True}
GPT2_SMALL = {
    **GPT2,
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50_304,
    "n_positions": 1024,
}
CASES = {
    case.name: case
    for case in (
        Case("A", "GPT-2 124M", GPT2_SMALL, 1024, 32, 50),
        Case(
            "B", "Qwen2.5-0.5B", QWEN_HALF_B, 4096, 8, 50, equal_parts=4, first_parts={"trainer": 4}
        ),
        Case(
            "C",
            "Llama-3.2-1B",
            LLAMA_1B,
            4096,
            8,
            equal_parts=4,
            first_parts={"trainer": 4},
            is_traced=True,
        ),
        Case(
            "D",
            "Llama-3.2-1B, packed",
            LLAMA_1B,
            8192,
            4,
            systems=("cpt", "trainer", "expert"),
            packed=True,
        ),
        Case(
            "E",
            "Llama-3-8B, LoRA",
            LLAMA_8B,
            4096,
            2,
            systems=ALL[1:],
            lora=LORA,
            training={
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"selective": True},
            },
            checkpoints=True,
        ),
        Case("F", "Llama-3-8B, all parameters", LLAMA_8B, 8192, 2, **FULL_8B),
        Case("F1", "Llama-3-8B, all parameters, one row", LLAMA_8B, 8192, 1, **FULL_8B),
        Case(
            "G",
            "3B, all parameters, 24 GB",
            LLAMA_3B,
            4096,
            2,
            training=SMALL,
            **IN_8_BIT,
            **ON_24_GB,
        ),
        Case(  # as recipes/prototype_rtx4090_64gb.yaml
            "H",
            "8B, all parameters, 24 GB",
            LLAMA_8B,
            2048,
            2,
            training={**SMALL, "max_grad_norm": 0},
            optimizer=PAGED,
            model={"dtype": "bfloat16"},
            evaluates=True,
            **ON_24_GB,
        ),
    )
}
PEAK_FLOPS, REACHED_BY_MATRICES = (
    989.4e12,
    790e12,
)  # H100 and H200, bfloat16: dense peak; an 8192^3 product there


def tiny(case: Case) -> Case:
    """The same case in seconds on a CPU: two narrow layers, short rows, all options unchanged."""
    if case.config["model_type"] == "gpt2":
        narrow = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 512}
    else:
        narrow = {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
        }
        narrow |= {"vocab_size": 512} | ({"head_dim": 8} if "head_dim" in case.config else {})
    rows = min(case.rows, max(2, case.equal_parts))
    return replace(
        case,
        config={**case.config, **narrow},
        tokens=64,
        rows=rows,
        steps=20,
        documents=3,
        gib=None,
    )
