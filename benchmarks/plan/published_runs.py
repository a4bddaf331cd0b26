"""Training runs whose speed was published: what was trained, on what, how fast, and where that stands."""

from dataclasses import dataclass
from typing import Any

FOUNDRY = "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
TITAN = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
CORE = "pypi.org/project/ai2-olmo-core/1.2.0"
LLAMA_2 = "github.com/meta-llama/llama, MODEL_CARD.md"
LLAMA_3 = "github.com/meta-llama/llama3, MODEL_CARD.md"


def llama(
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    key_value: int,
    vocabulary: int,
    kind: str = "llama",
    **others: Any,
) -> dict[str, Any]:
    """A shape of that family."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    } | others


def mpt(width: int, layers: int, heads: int) -> dict[str, Any]:
    """GPT-2's shape is that of MPT, but for positions and biases."""
    return {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": 50368,
        "n_positions": 2048,
    }


def by_hours(tokens: float, gpu_hours: float) -> float:
    """Tokens a second of a GPU, of a whole run."""
    return tokens / gpu_hours / 3600


@dataclass(frozen=True)
class Run:
    """One that was published."""

    name: str
    config: dict[str, Any]
    gpu: str
    nodes: int
    """Machines, each with 8 GPUs."""
    length: int
    micro_batch: int
    rate: float
    """Tokens a second of each GPU."""
    source: str
    accumulation: int = 1
    utilization: float | None = None
    """Share of the peak that its authors give; where layers were computed again, with that work."""
    checkpointing: bool = False
    links: str | None = None
    """None: what the planner assumes."""
    is_whole: bool = False
    """By the GPU hours of the whole run, with all that was lost in it."""
    is_split_otherwise: bool = False
    """Over tensors and stages, which is not planned: what goes over the links does not count."""
    is_number_given: bool = True
    """False where nobody said on how many GPUs, or with which micro-batches: then what waits says nothing."""


LLAMA_3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA_2_7B = llama(4096, 11008, 32, 32, 32, 32000)
OLMO_7B, OLMO_13B = llama(4096, 11008, 32, 32, 32, 100352, "olmo2"), llama(5120, 13824, 40, 40, 40, 100352, "olmo2")
MPT_7B, MPT_13B, MPT_30B, MPT_70B = mpt(4096, 32, 32), mpt(5120, 40, 40), mpt(7168, 48, 64), mpt(8192, 80, 64)
SPEEDS = (
    Run("torchtitan, Llama 3.1 8B, FSDP", LLAMA_3_8B, "H100", 1, 8192, 2, 5762, TITAN, utilization=0.33),
    Run("the same, compiled", LLAMA_3_8B, "H100", 1, 8192, 2, 6667, TITAN, utilization=0.39),
    Run("torchtitan, 16 machines", LLAMA_3_8B, "H100", 16, 8192, 2, 5605, TITAN, utilization=0.33),
    Run("the same, compiled", LLAMA_3_8B, "H100", 16, 8192, 2, 6514, TITAN, utilization=0.39),
    Run("llm-foundry, MPT 7B, FSDP", MPT_7B, "H100", 1, 2048, 6, 10643, FOUNDRY, utilization=0.4644),
    Run("llm-foundry, MPT 13B", MPT_13B, "H100", 1, 2048, 2, 4792, FOUNDRY, utilization=0.3979),
    Run("the same, 2 machines", MPT_13B, "H100", 2, 2048, 2, 4767, FOUNDRY, utilization=0.3958),
    Run("the same, 8 machines", MPT_13B, "H100", 8, 2048, 2, 4800, FOUNDRY, utilization=0.3986),
    Run("llm-foundry, MPT 30B", MPT_30B, "H100", 4, 2048, 14, 2308, FOUNDRY, 3, 0.5857, True),
    Run("llm-foundry, MPT 70B", MPT_70B, "H100", 4, 2048, 2, 882, FOUNDRY, 16, 0.482, True),
    Run("the same, 8 machines", MPT_70B, "H100", 8, 2048, 8, 1039, FOUNDRY, 4, 0.5676, True),
    Run("llm-foundry, MPT 13B", MPT_13B, "A100-40GB", 2, 2048, 10, 1993, FOUNDRY, 1, 0.70, True, "8 x roce200"),
    Run("the same, 16 machines", MPT_13B, "A100-40GB", 16, 2048, 16, 1972, FOUNDRY, 1, 0.6924, True, "8 x roce200"),
    Run("llm-foundry, MPT 70B", MPT_70B, "A100-40GB", 8, 2048, 2, 276, FOUNDRY, 1, 0.4782, True, "8 x roce200"),
    Run("OLMo-core, OLMo 2 7B", OLMO_7B, "H100", 16, 4096, 2, 9850, CORE, 2, 0.475, is_number_given=False),
    Run("OLMo-core, OLMo 2 13B", OLMO_13B, "H100", 16, 4096, 1, 4500, CORE, 4, 0.415, is_number_given=False),
)
WHOLE = (
    Run(
        "TinyLlama 1.1B",
        llama(2048, 5632, 22, 32, 4, 32000),
        "A100-40GB",
        2,
        2048,
        8,
        24000,
        "github.com/jzhang38/TinyLlama, README.md",
        8,
        0.56,
        is_whole=True,
    ),
    Run(
        "SmolLM3 3B",
        llama(2048, 11008, 36, 16, 4, 128256, "smollm3", tie_word_embeddings=True),
        "H100",
        48,
        4096,
        1,
        by_hours(11.2e12, 384 * 24 * 24),
        "huggingface.co/blog/smollm3: 11.2T tokens, 384 GPUs, 24 days; share: tzafon.ai/blog/breaking-40k-tokens",
        1,
        0.294,
        is_whole=True,
    ),
    Run(
        "fms-fsdp, Llama 2 7B's shape",
        LLAMA_2_7B,
        "A100-80GB",
        16,
        4096,
        2,
        by_hours(2.2e12, 162e3),
        "github.com/foundation-model-stack/fms-fsdp, README.md: 2.2T tokens, 162k GPU hours",
        is_whole=True,
        links="4 x roce100",
    ),
    Run(
        "Llama 2 7B",
        LLAMA_2_7B,
        "A100-80GB",
        16,
        4096,
        4,
        by_hours(2e12, 184_320),
        LLAMA_2,
        2,
        is_whole=True,
        is_number_given=False,
    ),
    Run(
        "Llama 2 70B",
        llama(8192, 28672, 80, 64, 8, 32000),
        "A100-80GB",
        250,
        4096,
        1,
        by_hours(2e12, 1_720_320),
        LLAMA_2,
        is_whole=True,
        is_number_given=False,
        is_split_otherwise=True,
    ),
    Run(
        "Llama 3 8B",
        LLAMA_3_8B,
        "H100",
        128,
        8192,
        1,
        by_hours(15e12, 1.3e6),
        LLAMA_3,
        is_whole=True,
        is_number_given=False,
    ),
    Run(
        "Llama 3 70B",
        llama(8192, 28672, 80, 64, 8, 128256),
        "H100",
        128,
        8192,
        1,
        by_hours(15e12, 6.4e6),
        LLAMA_3,
        is_whole=True,
        is_number_given=False,
        is_split_otherwise=True,
    ),
    Run(
        "Llama 3.1 405B",
        llama(16384, 53248, 126, 128, 8, 128256),
        "H100",
        2048,
        8192,
        1,
        by_hours(15.6e12, 30.84e6),
        "github.com/meta-llama/llama-models, models/llama3_1/MODEL_CARD.md; arXiv 2407.21783, table 4",
        1,
        0.41,
        is_whole=True,
        is_split_otherwise=True,
    ),
    Run(
        "Olmo 3 7B",
        llama(4096, 11008, 32, 32, 32, 100278, "olmo3"),
        "H100",
        64,
        8192,
        1,
        7700,
        "muxup.com/2025q4/minipost-olmo3-training-cost, from Olmo 3's technical report",
        is_whole=True,
        is_number_given=False,
    ),
    Run(
        "Olmo 3 32B",
        llama(5120, 27648, 64, 40, 8, 100278, "olmo3"),
        "H100",
        128,
        8192,
        1,
        1900,
        "muxup.com/2025q4/minipost-olmo3-training-cost, from Olmo 3's technical report",
        is_whole=True,
        is_number_given=False,
    ),
)
