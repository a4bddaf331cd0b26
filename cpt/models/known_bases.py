"""What is published about base models that people continue from: their learning rates, batch, sequence length and
licence.

Only what the source says; what it does not say, or where nothing could be looked up, is None. Figures were looked up
in November 2026, of Pythia's files those of three sizes; the licences of Llama, Mistral and SmolLM were not: read the
card. The final learning rate is what the run ended at, which is where a careful continuation begins (arXiv 2403.08763,
2407.07263).
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
    """Where the figures stand: a paper, files of a repository, a card. "As quoted": read in a quotation of it."""
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
    return KnownBase(
        f"EleutherAI/pythia-{size}",
        "Apache-2.0",
        "EleutherAI/pythia: README.md, models/*.yml",
        peak,
        peak / 10,
        2_097_152,
        2048,
    )


LLAMA_2, LLAMA_3, LLAMA_31, LLAMA_32 = (f"Llama {version} Community License" for version in ("2", "3", "3.1", "3.2"))
PAPER_2, PAPER_3 = "arXiv 2307.09288", "arXiv 2407.21783, table 3, as quoted"
QWEN_25, QWEN_3 = "its card; arXiv 2412.15115, as quoted", "its card; arXiv 2505.09388, as quoted"
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
    KnownBase(
        "openai-community/gpt2",
        "MIT",
        "its card; the GPT-2 paper, section 2.3, as quoted",
        batch_tokens=524_288,
        sequence_length=1024,
    ),
    KnownBase("meta-llama/Llama-2-7b-hf", LLAMA_2, PAPER_2, 3e-4, 3e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Llama-2-13b-hf", LLAMA_2, PAPER_2, 3e-4, 3e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Llama-2-70b-hf", LLAMA_2, PAPER_2, 1.5e-4, 1.5e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Meta-Llama-3-8B", LLAMA_3, PAPER_3, 3e-4, sequence_length=8192),
    KnownBase("meta-llama/Llama-3.1-8B", LLAMA_31, PAPER_3, 3e-4, sequence_length=8192),
    KnownBase("meta-llama/Llama-3.2-1B", LLAMA_32, "its card"),
    KnownBase("meta-llama/Llama-3.2-3B", LLAMA_32, "its card"),
    KnownBase(
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        "Apache-2.0",
        "jzhang38/TinyLlama: README.md, pretrain/tinyllama.py",
        4e-4,
        4e-5,
        2_097_152,
        2048,
    ),
    # 2304 rows of 4096 tokens.
    KnownBase(
        "deepseek-ai/deepseek-llm-7b-base",
        "DeepSeek License",
        "deepseek-ai/DeepSeek-LLM: README.md",
        4.2e-4,
        4.2e-5,
        9_437_184,
        4096,
    ),
    # After the cosine a second stage falls to 0 on a line; the published weights are the mean of three of those.
    KnownBase(
        "allenai/OLMo-2-1124-7B",
        "Apache-2.0",
        "allenai/OLMo: configs/official-1124/OLMo2-7B-stage*.yaml",
        3e-4,
        0.0,
        4_194_304,
        4096,
    ),
    KnownBase("HuggingFaceTB/SmolLM2-1.7B", "Apache-2.0", "arXiv 2502.02737, as quoted", 5e-4, 0.0),
    KnownBase(
        "HuggingFaceTB/SmolLM-135M",
        "Apache-2.0",
        "huggingface/smollm: config_smollm1_135M.yaml",
        3e-3,
        0.0,
        1_048_576,
        2048,
    ),
    *(KnownBase(f"HuggingFaceTB/SmolLM2-{size}", "Apache-2.0", "its card") for size in ("135M", "360M")),
    *(KnownBase(f"Qwen/Qwen2.5-{size}", "Apache-2.0", QWEN_25, sequence_length=4096) for size in QWEN_FREE),
    KnownBase("Qwen/Qwen2.5-3B", "Qwen Research License", QWEN_25, sequence_length=4096),
    *(
        KnownBase(f"Qwen/Qwen3-{size}-Base", "Apache-2.0", QWEN_3, sequence_length=4096)
        for size in ("0.6B", "1.7B", "4B", "8B")
    ),
    KnownBase("mistralai/Mistral-7B-v0.1", "Apache-2.0", "its card"),
    KnownBase("mistralai/Mistral-7B-v0.3", "Apache-2.0", "its card"),
    KnownBase(
        "nvidia/Minitron-8B-Base",
        "NVIDIA Open Model License, research and development only",
        "its card",
        sequence_length=4096,
    ),
]
BY_NAME = {base.name.lower(): base for base in BASES}
BY_LAST_PART = {base.name.split("/")[1].lower(): base for base in BASES}
