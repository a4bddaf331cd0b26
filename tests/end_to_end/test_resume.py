"""A run that is resumed, on as many processes as before or on others, is the run that was never interrupted."""

import json

import pytest
from launching import launch_to_its_end, losses
from resuming import forget_after, interrupted_equals_straight, recipe_of

from cpt.runs.events import read_events


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        pytest.param(3, False, marks=pytest.mark.slow),
        pytest.param(0, False, marks=pytest.mark.long),
        pytest.param(2, True, marks=pytest.mark.long),
    ],
)
def test_on_two_processes_it_resumes_bit_for_bit(tiny_recipe, tmp_path, stage, offload):
    tiny_recipe["training"]["bf16"] = bool(stage)
    interrupted_equals_straight(tiny_recipe, tmp_path, at=(3,), stage=stage, offload=offload, processes=2)


@pytest.fixture
def adapted(tiny_recipe, tmp_path):
    """Sections of a run with LoRA on a trained model."""
    launch_to_its_end(recipe_of(tiny_recipe, tmp_path, every=8, name="base"))
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


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("stage", "offload", "dropout"), [(0, False, 0.1), (2, True, 0.0), (3, False, 0.0)])
def test_two_processes_then_one_then_two_have_the_losses_of_two(tiny_recipe, tmp_path, stage, offload, dropout):
    tiny_recipe["optimizer"]["embedding_learning_rate"] = 3e-4
    recipe = recipe_of(tiny_recipe, tmp_path, stage=stage, offload=offload, dropout=dropout)
    run = tmp_path / "runs" / "tiny"
    launch_to_its_end(recipe, processes=2)
    straight = losses(run)
    for step, processes in ((3, 1), (5, 2)):
        forget_after(run, step)
        launch_to_its_end(recipe, processes=processes)
        assert losses(run) == pytest.approx(straight, rel=1e-3 if dropout else 2e-6)
    assert [event["kind"] for event in read_events(run)] == ["elastic", "elastic"]
    exactness = json.loads((run / "checkpoint-8" / "manifest.json").read_text())["exactness"]
    assert exactness.startswith("elastic") and not list(run.glob(".universal-*"))
