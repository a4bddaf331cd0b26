"""A run that is resumed, on as many processes as before or on others, is the run that was never interrupted."""

import json

import pytest
import torch
from launching import launch_to_its_end, losses
from resuming import forget_after, interrupted_equals_straight, recipe_of
from tiny import write_recipe

from cpt.optim.adamw import automatic_dtype
from cpt.recipe.load import load_recipe
from cpt.train import train


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


@pytest.mark.slow
def test_auto_keeps_the_type_of_the_weights_that_a_run_began_with(tiny_recipe, tmp_path, monkeypatch):
    """A run that began in bfloat16 on a CPU resumes on a GPU, where `auto` is float32."""

    def as_on_a_gpu(recipe, *, deepspeed, **_):
        return automatic_dtype(recipe, deepspeed=deepspeed, on_gpu=True)

    tiny_recipe["training"] |= {"bf16": True, "use_cpu": True}
    tiny_recipe["checkpoints"] = {"every_steps": 4, "keep": None}
    recipe, run = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml")), tmp_path / "runs" / "tiny"
    monkeypatch.setattr("cpt.training.arguments.automatic_dtype", lambda *_, **__: torch.bfloat16)
    train(recipe)
    straight = losses(run)
    forget_after(run, 4)
    monkeypatch.setattr("cpt.training.arguments.automatic_dtype", as_on_a_gpu)
    train(recipe)
    assert losses(run) == straight
    assert json.loads((run / "inputs.json").read_text())["weights"]["dtype"] == "bfloat16"
