"""A teacher that knows a small corpus, and students of it."""

import json
from pathlib import Path

import torch
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.data.rows.build import data_of
from cpt.stages.build import build_trainer
from cpt.stages.models import model_for
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import training_arguments


def save_teacher(
    folder: Path, tokenizer_folder: Path, texts: list[str], *, steps: int = 60, **shape
) -> Path:
    """Trained on the beginnings of the texts."""
    save_llama(folder, tokenizer_folder, 1, **shape)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(tokenizer_folder),
    )
    rows = [ids[:24] for ids in tokenizer(texts)["input_ids"] if len(ids) >= 24]
    ids = torch.tensor(rows[:32])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def texts_of(corpus: Path) -> list[str]:
    """Of its domain."""
    return [json.loads(line)["text"] for line in (corpus / "domain.jsonl").read_text().splitlines()]


def student_trainer(recipe):
    """As a run builds it."""
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = data_of(recipe, tokenizer)
    arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data)
    return build_trainer(
        recipe, model_for(recipe, tokenizer, arguments), tokenizer, data, arguments
    )
