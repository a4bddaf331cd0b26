"""Add a LoRA adapter into the weights of the model that it was trained on."""

from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cpt.models.adapters import merge_lora
from cpt.models.build import build_model
from cpt.models.zero3 import without_zero3
from cpt.recipe.schema import Model


def merge_into_base(adapter: Path, model: Model, tokenizer: PreTrainedTokenizerBase, *, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    """Build the base model anew, as the run did, and merge the saved adapter into it; one process does it alone.

    Args:
        adapter: folder that peft saved.
        seed: of the run; decides rows that the vocabulary grew by.
    """
    with without_zero3():
        base = build_model(model.model_copy(update={"lora": None, "hashes": {}}), tokenizer, seed=seed, dtype=dtype)
        return merge_lora(PeftModel.from_pretrained(base, adapter))
