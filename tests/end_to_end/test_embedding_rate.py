"""Embeddings with a learning rate of their own: the same losses in one process, in two, and under ZeRO."""

import pytest
import torch
from launching import launch, losses, zero_profile
from resuming import interrupted_equals_straight
from safetensors.torch import load_file
from tiny import TINY_LLAMA, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.models.build import build_model
from cpt.recipe.schema import Model


def run_losses(sections, tmp_path, *, way, processes=1, stage=0, offload=False):
    """Losses of the recipe, started that way; stage is ZeRO's, 0 is plain or DDP."""
    name = f"{way}-{processes}-zero{stage}{'-offload' if offload else ''}"
    training = {
        **sections["training"],
        **({"deepspeed": zero_profile(tmp_path, stage, offload=offload)} if stage else {}),
    }
    recipe = write_recipe({**sections, "name": name, "training": training}, tmp_path / f"{name}.yaml")
    result = launch(recipe, way=way, processes=processes)
    assert result.returncode == 0, result.stdout + result.stderr
    return losses(tmp_path / "runs" / name)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def sections(request, tiny_recipe, tokenizer_folder, tmp_path):
    """Continued pre-training of a model on the disk, its embeddings at a tenth of the rate."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    config = TINY_LLAMA | {"tie_word_embeddings": request.param}
    build_model(Model(from_scratch=True, config=config), tokenizer).save_pretrained(tmp_path / "base")
    optimizer = {"learning_rate": 3e-3, "embedding_learning_rate": 3e-4}
    return {**tiny_recipe, "stage": "cpt", "model": {"path": str(tmp_path / "base")}, "optimizer": optimizer}


@pytest.mark.long
@pytest.mark.parametrize("lora", [None, "cpt"])
def test_every_way_to_start_has_the_same_losses(sections, tmp_path, lora):
    sections["model"]["lora"] = lora
    alone = run_losses(sections, tmp_path, way="python")
    at_one_rate = run_losses({**sections, "optimizer": {"learning_rate": 3e-3}}, tmp_path, way="cpt")
    assert alone[-1] < alone[0] and alone != at_one_rate
    for stage, offload in ((0, False), (2, False), (2, True), (3, False)):
        found = run_losses(sections, tmp_path, way="torchrun", processes=2, stage=stage, offload=offload)
        assert found == pytest.approx(alone, abs=1e-5), (stage, offload)
    expected, *others = (logits_of(run) for run in tmp_path.glob("runs/*zero*") if not run.name.startswith("cpt"))
    assert len(others) == 4 and all(torch.allclose(one, expected, atol=1e-3) for one in others)


def logits_of(run):
    """What plain transformers gets from the run's export, whose head is stored once where it is tied."""
    model, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert ("lm_head.weight" in load_file(run / "final" / "model.safetensors")) != model.config.tie_word_embeddings
    return model(torch.arange(60)[None]).logits


@pytest.mark.long
@pytest.mark.parametrize(("stage", "offload"), [(0, False), (2, False), (2, True), (3, False)])
def test_lora_with_trained_embeddings_goes_on_bit_for_bit(sections, tmp_path, stage, offload):
    sections["model"]["lora"] = {"preset": "cpt", "lora_dropout": 0.1}
    interrupted_equals_straight(sections, tmp_path, at=[5], stage=stage, offload=offload, processes=2)
