"""Published pre-training settings of popular base models, looked up in November 2026; "as quoted" means read in a
quotation of the source. A careful continuation starts at the final learning rate (arXiv 2403.08763, 2407.07263)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class KnownBase:
    name: str  # Hub id
    source: str  # paper, files of a repository, or model card
    peak_learning_rate: float | None = None
    final_learning_rate: float | None = None  # 0 if the learning rate was annealed to zero
    batch_tokens: int | None = None
    sequence_length: int | None = None  # tokens in a row, before any extension of the context


def known_base(path: str) -> KnownBase | None:
    """Return the base with this Hub id, or of a local folder with the same name."""
    return BY_NAME.get(path.lower()) or BY_LAST_PART.get(Path(path).name.lower())


PYTHIA = "EleutherAI/pythia: README.md, models/*.yml"
PYTHIA_PEAKS = {"70m": 1e-3, "160m": 6e-4, "410m": 3e-4, "1b": 3e-4, "1.4b": 2e-4, "2.8b": 1.6e-4}
PYTHIA_PEAKS |= {"6.9b": 1.2e-4, "12b": 1.2e-4}
LLAMA_2 = "arXiv 2307.09288"
LLAMA_3 = "arXiv 2407.21783, table 3, as quoted"
QWEN_25 = "its card; arXiv 2412.15115, as quoted"
QWEN_3 = "its card; arXiv 2505.09388, as quoted"
GPT_2 = "its card; the GPT-2 paper, section 2.3, as quoted"
TINY_LLAMA = "jzhang38/TinyLlama: README.md, pretrain/tinyllama.py"
DEEPSEEK = "deepseek-ai/DeepSeek-LLM: README.md"
OLMO = "allenai/OLMo: configs/official-1124/OLMo2-7B-stage*.yaml"
SMOL = "huggingface/smollm: config_smollm1_135M.yaml"
BASES = [
    # All sizes trained on the same 300B tokens, in batches of 1024 rows, down to a tenth of the peak.
    *(
        KnownBase(f"EleutherAI/pythia-{size}", PYTHIA, peak, peak / 10, 2_097_152, 2048)
        for size, peak in PYTHIA_PEAKS.items()
    ),
    KnownBase("openai-community/gpt2", GPT_2, batch_tokens=524_288, sequence_length=1024),
    KnownBase("meta-llama/Llama-2-7b-hf", LLAMA_2, 3e-4, 3e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Llama-2-13b-hf", LLAMA_2, 3e-4, 3e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Llama-2-70b-hf", LLAMA_2, 1.5e-4, 1.5e-5, 4_194_304, 4096),
    KnownBase("meta-llama/Meta-Llama-3-8B", LLAMA_3, 3e-4, sequence_length=8192),
    KnownBase("meta-llama/Llama-3.1-8B", LLAMA_3, 3e-4, sequence_length=8192),
    KnownBase(
        "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T",
        TINY_LLAMA,
        4e-4,
        4e-5,
        2_097_152,
        2048,
    ),
    # 2304 rows of 4096 tokens.
    KnownBase("deepseek-ai/deepseek-llm-7b-base", DEEPSEEK, 4.2e-4, 4.2e-5, 9_437_184, 4096),
    # After the cosine, a second stage decays linearly to 0; the published weights average three such runs.
    KnownBase("allenai/OLMo-2-1124-7B", OLMO, 3e-4, 0.0, 4_194_304, 4096),
    KnownBase("HuggingFaceTB/SmolLM2-1.7B", "arXiv 2502.02737, as quoted", 5e-4, 0.0),
    KnownBase("HuggingFaceTB/SmolLM-135M", SMOL, 3e-3, 0.0, 1_048_576, 2048),
    *(
        KnownBase(f"Qwen/Qwen2.5-{size}", QWEN_25, sequence_length=4096)
        for size in ("0.5B", "1.5B", "3B", "7B")
    ),
    *(
        KnownBase(f"Qwen/Qwen3-{size}-Base", QWEN_3, sequence_length=4096)
        for size in ("0.6B", "1.7B", "4B", "8B")
    ),
    KnownBase("nvidia/Minitron-8B-Base", "its card", sequence_length=4096),
]
BY_NAME = {base.name.lower(): base for base in BASES}
BY_LAST_PART = {base.name.split("/")[1].lower(): base for base in BASES}
