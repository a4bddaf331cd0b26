"""A tiny model, extended by `cpt tokenizer extend`, and a recipe in which only its new rows learn."""

import json
from pathlib import Path

import torch
from tiny import TINY_LLAMA
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cpt.cli import main

ADDED = 12


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


def extend(model: Path, text: Path, output: Path, *options: str, add: int = ADDED) -> int:
    """The exit code of `cpt tokenizer extend`."""
    words = ["--text", str(text), "--add", str(add), "--output", str(output)]
    try:
        main(["tokenizer", "extend", str(model), *words, *options])
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def new_rows_recipe(sections: dict, model: Path) -> dict:
    """The tiny recipe as a phase of continued pre-training in which only the new rows learn, with weight decay."""
    return {
        **{key: value for key, value in sections.items() if key != "tokenizer"},
        "stage": "cpt",
        "model": {"path": str(model), "train_only": "new_rows"},
        "optimizer": {"name": "adamw", "learning_rate": 3e-2, "weight_decay": 0.5},
        "checkpoints": {"every_steps": 4, "keep": None},
    }


def new_tokens(folder: Path) -> list[int]:
    return [token["id"] for token in json.loads((folder / "extension.json").read_text())["tokens"]]
