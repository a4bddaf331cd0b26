"""Embeddings with a learning rate of their own: the same losses in one process, in two, and under ZeRO."""

import pytest
from launching import launch, losses, zero_profile
from tiny import TINY_LLAMA, write_recipe
from transformers import AutoTokenizer

from cpt.models.build import build_model
from cpt.recipe.schema import Model


def run_losses(sections, tmp_path, *, way, processes=1, stage=0):
    """Losses of the recipe, started that way; stage is ZeRO's, 0 is plain or DDP."""
    name = f"{way}-{processes}-zero{stage}"
    training = {**sections["training"], **({"deepspeed": zero_profile(tmp_path, stage)} if stage else {})}
    recipe = write_recipe({**sections, "name": name, "training": training}, tmp_path / f"{name}.yaml")
    result = launch(recipe, way=way, processes=processes)
    assert result.returncode == 0, result.stdout + result.stderr
    return losses(tmp_path / "runs" / name)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, "cpt"])
def test_every_way_to_start_has_the_same_losses(tiny_recipe, tokenizer_folder, tmp_path, lora):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    build_model(Model(from_scratch=True, config=TINY_LLAMA), tokenizer).save_pretrained(tmp_path / "base")
    optimizer = {"learning_rate": 3e-3, "embedding_learning_rate": 3e-4}
    sections = {**tiny_recipe, "stage": "cpt", "model": {"path": str(tmp_path / "base"), "lora": lora}, "optimizer": optimizer}
    alone = run_losses(sections, tmp_path, way="python")
    at_one_rate = run_losses({**sections, "optimizer": {"learning_rate": 3e-3}}, tmp_path, way="cpt")
    assert alone[-1] < alone[0] and alone != at_one_rate
    for stage in (0, 2, 3):
        assert run_losses(sections, tmp_path, way="torchrun", processes=2, stage=stage) == pytest.approx(alone, rel=1e-4), stage
