"""Embeddings with a learning rate of their own: the same losses in one process, in two, and under ZeRO."""

import pytest
from resuming import interrupted_equals_straight
from tiny import TINY_LLAMA
from transformers import AutoTokenizer

from cpt.models.build import build_model
from cpt.recipe.schema import Model


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def sections(request, tiny_recipe, tokenizer_folder, tmp_path):
    """Continued pre-training of a model on the disk, its embeddings at a tenth of the rate."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = TINY_LLAMA | {"tie_word_embeddings": request.param}
    build_model(Model(from_scratch=True, config=config), tokenizer).save_pretrained(tmp_path / "base")
    optimizer = {"learning_rate": 3e-3, "embedding_learning_rate": 3e-4}
    return {**tiny_recipe, "stage": "cpt", "model": {"path": str(tmp_path / "base")}, "optimizer": optimizer}


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (2, True), (3, False)])
def test_lora_with_trained_embeddings_goes_on_bit_for_bit(sections, tmp_path, stage, offload):
    sections["model"]["lora"] = {"preset": "cpt", "lora_dropout": 0.1}
    interrupted_equals_straight(sections, tmp_path, at=[5], stage=stage, offload=offload, processes=2)
