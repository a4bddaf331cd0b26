import json

import pytest
from tiny import write_recipe

from cpt.checkpoints.trained import find_trained
from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.models.config import load_config
from cpt.preflight.gate import check_reality
from cpt.recipe.load import load_recipe
from cpt.recipe.run_results import is_run, result_of_run, unfinished_run
from cpt.recipe.schema import Model
from cpt.runs.folder import INPUTS
from cpt.runs.record import Run
from cpt.tokenizer.load import from_folder_or_hub, load_tokenizer
from cpt.train import train


@pytest.fixture
def run_folder(tmp_path):
    """What a run leaves, without its weights."""
    folder = tmp_path / "runs" / "first"
    (folder / "final").mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: first\n")
    (folder / "status.json").write_text(json.dumps({"state": "finished"}))
    (folder / "final" / "config.json").write_text("{}")
    return folder


def test_a_finished_run_is_its_exported_model(run_folder, tiny_recipe, tmp_path):
    assert result_of_run(str(run_folder)) == str(run_folder / "final") and unfinished_run(str(run_folder)) is None
    del tiny_recipe["tokenizer"]
    recipe = load_recipe(
        write_recipe({**tiny_recipe, "stage": "cpt", "model": {"path": str(run_folder)}}, tmp_path / "r.yaml")
    )
    assert recipe.model.path == str(run_folder / "final")


@pytest.mark.parametrize("path", ["gpt2", "nvidia/Minitron-8B-Base", "./nowhere", None])
def test_other_paths_stay_as_they_are(path):
    assert result_of_run(path) == path


def test_a_models_folder_and_a_checkpoint_are_no_runs(run_folder):
    checkpoint = run_folder / "checkpoint-4"
    checkpoint.mkdir()
    for folder in (checkpoint, run_folder / "final"):
        assert not is_run(str(folder)) and result_of_run(str(folder)) == str(folder)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (
            '{"state": "interrupted"}',
            r"has not finished \(its state: interrupted\). Let it end: cpt train .*first/recipe.yaml",
        ),
        ('{"sta', r"has not finished \(its state: not started\)"),
        ('{"state": "finished"}', "has lost its model"),
    ],
)
def test_a_run_that_came_to_nothing_yet_is_refused_with_what_to_do(run_folder, status, said):
    (run_folder / "status.json").write_text(status)
    if "lost" in said:
        (run_folder / "final" / "config.json").unlink()
    assert result_of_run(str(run_folder)) == str(run_folder)
    with pytest.raises(RecipeError, match=f"model.path: .*first is a run that {said}"):
        load_config(Model(path=str(run_folder)))
    with pytest.raises(RecipeError, match=f"tokenizer.path`: .*first is a run that {said}"):
        from_folder_or_hub(str(run_folder), None, False)


def test_a_run_that_has_not_finished_is_a_blocker_and_no_mistake(run_folder, tiny_recipe, tmp_path):
    (run_folder / "status.json").write_text('{"state": "running"}')
    sections = {**tiny_recipe, "stage": "cpt", "model": {"path": str(run_folder)}}
    found = check_reality(load_recipe(write_recipe(sections, tmp_path / "r.yaml")))
    assert found.mistakes == [] and "first is a run that has not finished" in str(found.blockers[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [None, pytest.param({"r": 4}, marks=pytest.mark.long), pytest.param({"method": "lokr"}, marks=pytest.mark.long)],
    ids=str,
)
def test_a_run_goes_on_from_what_another_one_learned(tiny_recipe, tmp_path, lora):
    base = train(load_recipe(write_recipe(tiny_recipe, tmp_path / "a.yaml")))
    first = {**tiny_recipe, "name": "first", "stage": "cpt", "model": {"path": str(base.parent), "lora": lora}}
    train(load_recipe(write_recipe(first, tmp_path / "b.yaml")))
    runs = tmp_path / "runs"
    second = {**tiny_recipe, "name": "second", "stage": "cpt", "model": {"path": str(runs / "first")}, "tokenizer": {}}
    path = write_recipe(second, tmp_path / "c.yaml")
    recipe = load_recipe(path)
    start = build_model(recipe.model, load_tokenizer(recipe.tokenizer, recipe.model)).state_dict()
    exported = find_trained(runs / "first" / "final").folder
    whole = build_model(Model(path=str(exported)), load_tokenizer(recipe.tokenizer, recipe.model)).state_dict()
    before = build_model(Model(path=str(base)), load_tokenizer(recipe.tokenizer, recipe.model)).state_dict()
    assert all(start[name].equal(whole[name]) for name in whole) and not all(
        start[name].equal(before[name]) for name in whole
    )
    train(recipe)
    assert Run(runs / "second").is_finished
    assert json.loads((runs / "second" / INPUTS).read_text())["weights"]["path"] == str(runs / "first" / "final")
    assert train(load_recipe(path)) == runs / "second" / "final"  # the recipe is still that of this run
