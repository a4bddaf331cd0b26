import json

import pytest
from launching import BIN, launch
from tiny import write_recipe

from cpt.checkpoints.manifest import verify_path
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
def test_without_the_hub_a_model_is_refused_at_once_and_no_run_is_left(tiny_recipe, tmp_path, section):
    recipe = load_recipe(write_recipe({**tiny_recipe, **section}, tmp_path / "r.yaml"))
    with pytest.raises(ResourceError, match="lab/never.*the Hub cannot be reached.*hf download lab/never"):
        check_and_train(recipe)
    assert not (tmp_path / "runs" / "tiny").exists()


@pytest.mark.slow
def test_the_file_started_alone_prints_the_mistake_and_ends_with_code_2(tiny_recipe, tmp_path):
    tiny_recipe["data"]["sources"][0]["text_column"] = "body"
    ended = launch(write_recipe(tiny_recipe, tmp_path / "r.yaml"), way="python")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "domain.jsonl" in ended.stderr and "body" in ended.stderr


@pytest.mark.long
def test_both_processes_stop_at_the_mistake_and_it_is_printed_once(tiny_recipe, tmp_path):
    tiny_recipe["optimizer"]["name"] = "adamv"
    ended = launch(write_recipe(tiny_recipe, tmp_path / "r.yaml"), way="torchrun", processes=2)
    assert ended.returncode != 0 and ended.stderr.count("Did you mean `adamw`") == 1
    assert json.loads((tmp_path / "runs" / "tiny" / "status.json").read_text())["exit_code"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        ("--processes", "2"),
        pytest.param(("--launcher", f"{BIN / 'torchrun'} --standalone --nproc-per-node 2"), marks=pytest.mark.long),
    ],
)
def test_processes_and_launcher_start_so_many_without_supervision_and_pass_the_exit_code_on(
    tiny_recipe, tmp_path, how
):
    recipe = write_recipe(tiny_recipe, tmp_path / "r.yaml")
    ended = launch(recipe, way="cpt", arguments=how)
    assert ended.returncode == 0, ended.stderr
    run = tmp_path / "runs" / "tiny"
    environment = json.loads((run / "environment.json").read_text())
    assert (environment["processes"], environment["launcher"]) == (2, "torchrun") and not (
        run / "starts.jsonl"
    ).exists()
    assert {path.name for path in (run / "heartbeats").iterdir()} == {"rank-0.json", "rank-1.json"}
    tiny_recipe["data"]["sources"][0]["text_column"] = "body"
    wrong = launch(write_recipe(tiny_recipe, recipe), way="cpt", arguments=(*how, "name=wrong"))
    assert wrong.returncode == 2 and "body" in wrong.stderr.splitlines()[-1]


@pytest.mark.slow
def test_resume_goes_on_from_a_named_checkpoint_or_begins_anew_and_keeps_what_was_there(tiny_recipe, tmp_path):
    tiny_recipe["checkpoints"] = {"every_steps": 4}
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    run = train(recipe).parent
    straight = (run / "final" / "model.safetensors").read_bytes()
    for resume, aside in ((run / "checkpoint-4", ["checkpoint-8"]), ("none", ["checkpoint-4", "checkpoint-8"])):
        kept = {path.name for path in run.glob("set-aside*")}
        assert (train(recipe, resume=resume) / "model.safetensors").read_bytes() == straight, resume
        (new,) = {path.name for path in run.glob("set-aside*")} - kept
        assert sorted(path.name for path in (run / new).iterdir()) == aside
    assert [one.found for one in verify_path(run)] == [[], [], []]


def test_train_names_the_keys_that_still_say_auto(tiny_recipe, tmp_path):
    automatic = {**tiny_recipe, "training": {**tiny_recipe["training"], "per_device_train_batch_size": "auto"}}
    recipe = load_recipe(write_recipe(automatic, tmp_path / "r.yaml"))
    with pytest.raises(RecipeError, match="`training.per_device_train_batch_size`.*resolve_recipe"):
        train(recipe)
