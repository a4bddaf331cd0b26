"""A run that is resumed, on as many processes as before or on others, is the run that was never interrupted."""

import json

import pytest
import torch
from launching import losses
from resuming import forget_after
from tiny import write_recipe

from cpt.optim.adamw import automatic_dtype
from cpt.recipe.load import load_recipe
from cpt.train import train


@pytest.mark.slow
def test_auto_keeps_the_type_of_the_weights_that_a_run_began_with(
    tiny_recipe, tmp_path, monkeypatch
):
    """A run that began in bfloat16 on a CPU resumes on a GPU, where `auto` is float32."""

    def as_on_a_gpu(recipe, *, deepspeed, **_):
        return automatic_dtype(recipe, deepspeed=deepspeed, on_gpu=True)

    tiny_recipe["training"] |= {"bf16": True, "use_cpu": True}
    tiny_recipe["checkpoints"] = {"every_steps": 4, "keep": None}
    recipe, run = (
        load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml")),
        tmp_path / "runs" / "tiny",
    )
    monkeypatch.setattr("cpt.training.arguments.automatic_dtype", lambda *_, **__: torch.bfloat16)
    train(recipe)
    straight = losses(run)
    forget_after(run, 4)
    monkeypatch.setattr("cpt.training.arguments.automatic_dtype", as_on_a_gpu)
    train(recipe)
    assert losses(run) == straight
    assert json.loads((run / "inputs.json").read_text())["weights"]["dtype"] == "bfloat16"
