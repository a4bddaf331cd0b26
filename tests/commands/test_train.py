"""`cpt train`, and `cpt recipes`, which it starts from."""

import pytest
import torch
from tiny import write_recipe

from cpt.commands.train import check_and_train
from cpt.errors import RecipeError, ResourceError
from cpt.files import SHIPPED_FILES
from cpt.recipe.load import load_recipe
from cpt.train import train


@pytest.mark.parametrize("section", [{"model": {"path": "lab/never"}}, {"tokenizer": {"path": "lab/never"}}])
def test_without_the_hub_a_model_is_refused_before_a_run_is_made(tiny_recipe, tmp_path, section):
    recipe = load_recipe(write_recipe({**tiny_recipe, **section}, tmp_path / "r.yaml"))
    with pytest.raises(ResourceError, match="hf download lab/never"):
        check_and_train(recipe)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_train_names_the_keys_that_are_still_auto(tiny_recipe, tmp_path):
    tiny_recipe["training"]["per_device_train_batch_size"] = "auto"
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    with pytest.raises(RecipeError, match="`training.per_device_train_batch_size`"):
        train(recipe)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is limited in silence")
def test_the_gpu_memory_is_limited_before_the_model_is_built(tiny_recipe, tmp_path, monkeypatch, caplog):
    recipe = load_recipe(write_recipe({**tiny_recipe, "safety": {"max_gpu_memory": 0.8}}, tmp_path / "recipe.yaml"))
    monkeypatch.setattr("cpt.train.model_for", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(recipe)
    assert "safety.max_gpu_memory" in caplog.text


def test_a_recipe_anywhere_may_name_the_parts_that_come_with_cpt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: models/gpt2/124m.yaml\nbudget: {tokens: 1000}\ndata: {sequence_length: 128, sources:"
        " [{path: texts}]}\ntraining: {deepspeed: deepspeed_configs/ds_config_zero1.json}\n"
    )
    recipe = load_recipe("mine.yaml")
    assert recipe.model.path == "openai-community/gpt2"
    assert recipe.training["deepspeed"] == str(SHIPPED_FILES / "deepspeed_configs/ds_config_zero1.json")
