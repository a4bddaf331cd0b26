import json

import pytest
from tiny import write_recipe

from cpt.errors import RecipeError
from cpt.models.config import load_config
from cpt.planning.gate import check_reality
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_run, result_of_run, unfinished_run
from cpt.recipe.schema import Model
from cpt.tokenizer.load import from_folder_or_hub


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
