import pytest
import torch
from launching import launch, zero_profile
from safetensors.torch import load_file
from tiny import TINY_LLAMA, write_recipe
from tiny_checkpoints import save_llama
from transformers import AutoModelForCausalLM

from cpt.checkpoints.model_folder import Tensors
from cpt.checkpoints.sharding import consolidated_state
from cpt.errors import CheckpointError
from cpt.export.export import write_average
from cpt.recipe.load import load_recipe
from cpt.train import train


@pytest.fixture
def three(tokenizer_folder, tmp_path):
    return [save_llama(tmp_path / f"checkpoint-{seed}", tokenizer_folder, seed) for seed in (1, 2, 3)]


def test_each_weight_is_the_mean(three, tmp_path):
    write_average(three, tmp_path / "mean", dtype=None, max_shard_size="50KB")
    parts, mean = [Tensors(folder) for folder in three], Tensors(tmp_path / "mean")
    for name in mean.files:
        expected = torch.stack([part.read(name).double() for part in parts]).mean(dim=0).float()
        torch.testing.assert_close(mean.read(name), expected, rtol=0, atol=1e-9)


def test_models_of_other_shapes_are_refused(three, tokenizer_folder, tmp_path):
    wide = save_llama(tmp_path / "wide", tokenizer_folder, 4, intermediate_size=96)
    deep = save_llama(tmp_path / "deep", tokenizer_folder, 4, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"\[32, 64\].*\[32, 96\].*different shapes"):
        write_average([three[0], wide], tmp_path / "mean", dtype=None, max_shard_size="5GB")
    with pytest.raises(CheckpointError, match="different shapes"):
        write_average([three[0], deep], tmp_path / "mean", dtype=None, max_shard_size="5GB")


def test_one_model_has_no_mean_and_an_adapter_is_no_model(three, adapter_folder, tmp_path):
    with pytest.raises(CheckpointError, match="two checkpoints or more"):
        write_average(three[:1], tmp_path / "mean", dtype=None, max_shard_size="5GB")
    with pytest.raises(CheckpointError, match="is an adapter. Merge it first"):
        write_average([three[0], adapter_folder], tmp_path / "mean", dtype=None, max_shard_size="5GB")
    assert not (tmp_path / "mean").exists()


def test_a_run_writes_the_mean_of_its_last_checkpoints_where_the_recipe_asks(tiny_recipe, tmp_path):
    tiny_recipe["checkpoints"] = {"every_steps": 2, "average": 3}
    run = train(load_recipe(write_recipe(tiny_recipe, tmp_path / "recipe.yaml"))).parent
    parts, mean = [Tensors(run / f"checkpoint-{step}") for step in (4, 6, 8)], Tensors(run / "average")
    name = "model.layers.0.mlp.up_proj.weight"
    expected = torch.stack([part.read(name).double() for part in parts]).mean(dim=0).float()
    torch.testing.assert_close(mean.read(name), expected, rtol=0, atol=1e-9)
    assert AutoModelForCausalLM.from_pretrained(run / "average").config.use_cache


@pytest.mark.long
@pytest.mark.parametrize(
    "stage",
    [pytest.param(0, marks=pytest.mark.slow), *(pytest.param(stage, marks=pytest.mark.long) for stage in (2, 3))],
)
def test_under_zero_it_is_the_mean_of_what_the_processes_hold_and_a_tied_head_is_stored_once(
    tiny_recipe, tmp_path, stage
):
    tiny_recipe["model"]["config"] = TINY_LLAMA | {"tie_word_embeddings": True}
    tiny_recipe["checkpoints"] = {"every_steps": 2, "average": 3}
    if stage:
        tiny_recipe["training"]["deepspeed"] = zero_profile(tmp_path, stage)
    ended = launch(write_recipe(tiny_recipe, tmp_path / "r.yaml"), way="torchrun", processes=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run, ids = tmp_path / "runs" / "tiny", torch.arange(60).unsqueeze(0)
    held = [
        consolidated_state(folder) if stage else load_file(folder / "model.safetensors")
        for folder in checkpoints(run, 4, 6, 8)
    ]
    mean, last = load_file(run / "average" / "model.safetensors"), load_file(run / "final" / "model.safetensors")
    assert mean.keys() == last.keys() and "lm_head.weight" not in last
    for name in mean:
        torch.testing.assert_close(
            mean[name], torch.stack([part[name].double() for part in held]).mean(0).float(), rtol=0, atol=1e-8
        )
        assert torch.equal(last[name], held[-1][name])
    final, checkpoint = (
        AutoModelForCausalLM.from_pretrained(run / name)(ids).logits for name in ("final", "checkpoint-8")
    )
    assert torch.equal(final, checkpoint)


def checkpoints(run, *steps):
    return [run / f"checkpoint-{step}" for step in steps]
