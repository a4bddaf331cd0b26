"""The smallest things that show behaviour: documents, a model's config, a recipe on disk."""

import json
import random
from pathlib import Path

import yaml

SENTENCE = "the model reads a document and learns which word comes after which other word in the text of its domain"
WORDS = SENTENCE.split()


def write_documents(path: Path, count: int, seed: int) -> Path:
    """JSONL of `count` documents of 5 to 120 words."""
    draw = random.Random(seed)
    lines = (
        json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(5, 120))) + f" number {i}."})
        for i in range(count)
    )
    path.write_text("\n".join(lines) + "\n")
    return path


TINY_LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}


def write_recipe(recipe: dict, path: Path) -> Path:
    """The sections as a YAML file."""
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return path
