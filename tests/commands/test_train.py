"""`cpt train`, and `cpt recipes`, which it starts from."""

import json

import pytest
from cpt.installation import SHIPPED_FILES
from launching import BIN, launch
from tiny import write_recipe

from cpt.commands.train import check_and_train
from cpt.errors import CptError, RecipeError, ResourceError
from cpt.recipe.load import load_recipe
from cpt.train import train


def test_a_failed_run_says_so_in_its_status(tiny_recipe, tmp_path):
    tiny_recipe["data"]["sources"][0]["path"] = str(tmp_path / "missing.jsonl")
    with pytest.raises(CptError, match="missing.jsonl"):
        train(load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml")))
    status = json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)


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


TORCHRUN = ("--launcher", f"{BIN / 'torchrun'} --standalone --nproc-per-node 2")


@pytest.mark.slow
@pytest.mark.parametrize("how", [("--processes", "2"), pytest.param(TORCHRUN, marks=pytest.mark.long)])
def test_processes_and_launcher_start_that_many_and_pass_the_exit_code_on(tiny_recipe, tmp_path, how):
    recipe = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    ended = launch(recipe, way="cpt", arguments=how)
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "tiny"
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["processes"], environment["launcher"]) == (2, "torchrun")
    assert not (run / "starts.jsonl").exists(), "it was not to be supervised"
    assert {path.name for path in (run / "heartbeats").iterdir()} == {"rank-0.json", "rank-1.json"}
    tiny_recipe["data"]["sources"][0]["text_column"] = "body"
    wrong = launch(write_recipe(tiny_recipe, recipe), way="cpt", arguments=(*how, "name=wrong"))
    assert wrong.returncode == 2 and "body" in wrong.stderr.splitlines()[-1]


def test_a_recipe_anywhere_may_name_the_parts_that_come_with_cpt(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: models/gpt2/124m.yaml\nbudget: {tokens: 1000}\ndata: {sequence_length: 128, sources:"
        " [{path: texts}]}\ntraining: {deepspeed: deepspeed_configs/ds_config_zero1.json}\n"
    )
    recipe = load_recipe("mine.yaml")
    assert recipe.model.path == "openai-community/gpt2"
    assert recipe.training["deepspeed"] == str(SHIPPED_FILES / "deepspeed_configs/ds_config_zero1.json")
