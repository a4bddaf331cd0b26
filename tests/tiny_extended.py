"""A tiny model to extend by `cpt tokenizer extend`."""

from pathlib import Path

import torch
from tiny import TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM


def write_model(folder: Path, tokenizer_folder: Path, *, tied: bool, rows: int = 328) -> Path:
    """A model whose vocabulary has a few rows more than its tokenizer tokens."""
    torch.manual_seed(0)
    config = {key: value for key, value in TINY_LLAMA.items() if key != "model_type"} | {
        "vocab_size": rows,
        "tie_word_embeddings": tied,
    }
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_folder).save_pretrained(folder)
    return folder
