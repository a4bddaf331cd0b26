"""What is published about base models that people continue from: their learning rates, batch, sequence length and licence.

Only what the paper or the card says; what neither says is None. A learning rate is what the run ended at, which is where a careful
continuation begins (arXiv 2403.08763, 2407.07263).
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownBase:
    """A published pre-training run."""

    name: str
    """Hub id."""
    licence: str
    source: str
    peak_learning_rate: float | None = None
    final_learning_rate: float | None = None
    """0 where the learning rate was annealed to nothing."""
    batch_tokens: int | None = None
    sequence_length: int | None = None
    """Tokens in a row during pre-training, before any extension of the context."""


def known_base(path: str) -> KnownBase | None:
    """The base of a Hub id, or of a local folder that is called like one."""
    return BY_NAME.get(path.lower()) or BY_LAST_PART.get(Path(path).name.lower())


def pythia(size: str, peak: float) -> KnownBase:
    """One size of the suite: all saw the same 300B tokens, in batches of 1024 rows, down to a tenth of the peak."""
    return KnownBase(f"EleutherAI/pythia-{size}", "Apache-2.0", "arXiv 2304.01373", peak, peak / 10, 2_097_152, 2048)


LLAMA_2, LLAMA_3, LLAMA_31, LLAMA_32 = (f"Llama {version} Community License" for version in ("2", "3", "3.1", "3.2"))
QWEN_FREE = ("0.5B", "1.5B", "7B")
BASES = [
    *(
        pythia(size, peak)
        for size, peak in {
            "70m": 1e-3,
            "160m": 6e-4,
            "410m": 3e-4,
            "1b": 3e-4,
            "1.4b": 2e-4,
            "2.8b": 1.6e-4,
            "6.9b": 1.2e-4,
            "12b": 1.2e-4,
        }.items()
    ),
    KnownBase("openai-community/gpt2", "MIT", "the GPT-2 paper", batch_tokens=524_288, sequence_length=1024),
    KnownBase("meta-llama/Llama-2-7b-hf", LLAMA_2, "arXiv 2307.09288", 3e-4, 3e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Llama-2-13b-hf", LLAMA_2, "arXiv 2307.09288", 3e-4, 3e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Llama-2-70b-hf", LLAMA_2, "arXiv 2307.09288", 1.5e-4, 1.5e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Meta-Llama-3-8B", LLAMA_3, "arXiv 2407.21783, table 3", 3e-4, sequence_length=8192),
    KnownBase("meta-llama/Llama-3.1-8B", LLAMA_31, "arXiv 2407.21783, table 3", 3e-4, sequence_length=8192),
    KnownBase("meta-llama/Llama-3.2-1B", LLAMA_32, "its card"),
    KnownBase("meta-llama/Llama-3.2-3B", LLAMA_32, "its card"),
    KnownBase("TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T", "Apache-2.0", "arXiv 2401.02385", 4e-4, 4e-5, 2_097_152, 2048),
    KnownBase("deepseek-ai/deepseek-llm-7b-base", "DeepSeek License", "arXiv 2401.02954", 4.2e-4, 4.2e-5, 9_437_184, 4096),
    KnownBase("allenai/OLMo-2-1124-7B", "Apache-2.0", "arXiv 2501.00656", 3e-4, 0.0, 4_194_304, 4096),
    KnownBase("HuggingFaceTB/SmolLM2-1.7B", "Apache-2.0", "arXiv 2502.02737", 5e-4, 0.0, 2_097_152, 2048),
    KnownBase("HuggingFaceTB/SmolLM2-360M", "Apache-2.0", "arXiv 2502.02737", 3e-3),
    KnownBase("HuggingFaceTB/SmolLM2-135M", "Apache-2.0", "arXiv 2502.02737", 3e-3),
    *(KnownBase(f"Qwen/Qwen2.5-{size}", "Apache-2.0", "its card; arXiv 2412.15115", sequence_length=4096) for size in QWEN_FREE),
    KnownBase("Qwen/Qwen2.5-3B", "Qwen Research License", "its card; arXiv 2412.15115", sequence_length=4096),
    *(KnownBase(f"Qwen/Qwen3-{size}-Base", "Apache-2.0", "its card") for size in ("0.6B", "1.7B", "4B", "8B")),
    KnownBase("mistralai/Mistral-7B-v0.1", "Apache-2.0", "its card"),
    KnownBase("mistralai/Mistral-7B-v0.3", "Apache-2.0", "its card"),
    KnownBase("nvidia/Minitron-8B-Base", "NVIDIA Open Model License: read the card", "its card", sequence_length=4096),
]
BY_NAME = {base.name.lower(): base for base in BASES}
BY_LAST_PART = {base.name.split("/")[1].lower(): base for base in BASES}
