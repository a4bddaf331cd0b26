"""A run that is resumed, on as many processes as before or on others, is the run that was never interrupted."""

import pytest
from launching import launch_to_its_end, losses
from resuming import forget_after, interrupted_equals_straight, recipe_of


@pytest.mark.parametrize(
    ("stage", "offload"),
    [pytest.param(3, False, marks=pytest.mark.slow), pytest.param(2, True, marks=pytest.mark.long)],
)
def test_on_two_processes_it_resumes_bit_for_bit(tiny_recipe, tmp_path, stage, offload):
    tiny_recipe["training"]["bf16"] = True
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(3,), stage=stage, offload=offload, processes=2)


@pytest.fixture
def adapted(tiny_recipe, tmp_path):
    """Sections of a run with LoRA on a trained model, without dropout: it would depend on the number of processes."""
    launch_to_its_end(recipe_of(tiny_recipe, tmp_path, dropout=0.0, every=8, name="base"))
    model = {"path": str(tmp_path / "runs" / "base" / "final"), "lora": {"preset": "cpt", "lora_dropout": 0.0}}
    return {**tiny_recipe, "stage": "cpt", "model": model}


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_and_trained_embeddings_resume_bit_for_bit_under_zero(adapted, tmp_path, stage):
    adapted["optimizer"]["embedding_learning_rate"] = 3e-4
    adapted["model"]["lora"]["lora_dropout"] = 0.1
    interrupted_equals_straight(adapted, tmp_path, at=(5,), stage=stage)


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_under_zero_continue_on_one_process(adapted, tmp_path, stage):
    recipe, run = recipe_of(adapted, tmp_path, stage=stage), tmp_path / "runs" / "tiny"
    launch_to_its_end(recipe, processes=2)
    straight = losses(run)
    forget_after(run, 4)
    launch_to_its_end(recipe)
    assert losses(run) == pytest.approx(straight, rel=2e-6)
