"""A run that is resumed, on as many processes as before or on others, is the run that was never interrupted."""

import json

import pytest
import torch
from launching import losses
from resuming import differences, forget_after
from tiny import write_recipe

from cpt.optim.adamw import automatic_dtype
from cpt.recipe.load import load_recipe
from cpt.train import train


@pytest.mark.quantized
@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [
        ({"name": "adamw_8bit"}, "float32"),
        ({"name": "adamw_8bit"}, "bfloat16"),
        ({"name": "paged_adamw_8bit", "release_gradients": True}, "bfloat16"),
        ({"name": "ademamix_8bit", "t_alpha": 6, "t_beta3": 6}, "float32"),
        ({"name": "paged_lion_32bit", "embedding_learning_rate": 1e-4}, "float32"),
    ],
)
def test_a_run_with_states_of_bitsandbytes_resumes_bit_for_bit(
    tiny_recipe, tmp_path, optimizer, dtype, in_background
):
    whole_batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    tiny_recipe["training"] |= {"use_cpu": True, "max_grad_norm": 0, **whole_batch}
    tiny_recipe["model"] |= {"dtype": dtype}
    tiny_recipe["optimizer"] = {"learning_rate": 1e-3, **optimizer}
    tiny_recipe["budget"] = {"tokens": 8 * 256}
    tiny_recipe["checkpoints"] = {"every_steps": 4, "keep": None, "in_background": in_background}
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    run = tmp_path / "runs" / "tiny"
    train(recipe)
    straight = losses(run)
    assert len(straight) == 8 and straight[-1] < straight[0]
    expected = (run / "checkpoint-8").rename(tmp_path / "expected")
    forget_after(run, 4)
    train(recipe)
    assert losses(run) == straight
    assert differences(expected, run / "checkpoint-8") == []


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
