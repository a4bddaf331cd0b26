"""Tiny models in every family that becomes GGUF, written and read back in this process."""

from pathlib import Path

import torch
from tiny_models import tiny_config
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from cpt.checkpoints.proof import ProofText, proof_text
from cpt.exporting.gguf_families import family_of
from cpt.exporting.gguf_file import write_gguf
from cpt.exporting.reload_gguf import logits_of_file

TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt2", "nemotron")
CHANGES = {
    "qwen3_moe": {"norm_topk_prob": True},
    "qwen3": {"head_dim": 16},
    "gpt2": {"n_positions": 512},
    "mistral": {"sliding_window": None},
}


def tiny_model(model_type: str, tokenizer: PreTrainedTokenizerBase, **changes) -> PreTrainedModel:
    """Random weights of which no two parts are alike, norms included; some rows of padding at the end of the
    vocabulary."""
    torch.manual_seed(0)
    shape = tiny_config("llama" if model_type == "mistral" else model_type) | {"model_type": model_type}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape |= {
        "vocab_size": len(tokenizer) + 5,
        "pad_token_id": None,
        **special,
        **CHANGES.get(model_type, {}),
        **changes,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    model.config.architectures = [type(model).__name__]
    return model


def written(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, file: Path, kind: str = "f32") -> ProofText:
    """The text to compare on."""
    write_gguf(model, tokenizer, family_of(model.config, "folder"), file, kind, file.stem)
    return proof_text(tokenizer, model.config)


def read_back(file: Path, text: ProofText) -> torch.Tensor:
    """The logits of plain transformers."""
    return logits_of_file(str(file.parent), file.name, {"text": text.text, "tokens": len(text.ids), "ids": text.ids})
