"""The folder of a run in place of a model means the model that it exported."""

import json

import pytest
from tiny import write_recipe

from cpt.errors import RecipeError
from cpt.models.config import load_config
from cpt.planning.gate import check_reality
from cpt.recipe.load import load_recipe
from cpt.recipe.paths import is_run, result_of_run
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


def recipe_of(run_folder, tiny_recipe, tmp_path):
    sections = {**tiny_recipe, "stage": "cpt", "model": {"path": str(run_folder)}}
    return load_recipe(write_recipe(sections, tmp_path / "r.yaml"))


def test_a_finished_run_is_its_exported_model(run_folder, tiny_recipe, tmp_path):
    assert recipe_of(run_folder, tiny_recipe, tmp_path).model.path == str(run_folder / "final")


def test_other_paths_a_models_folder_and_a_checkpoint_are_no_runs(run_folder):
    (run_folder / "checkpoint-4").mkdir()
    for path in (
        "gpt2",
        "nvidia/Minitron-8B-Base",
        "./nowhere",
        run_folder / "checkpoint-4",
        run_folder / "final",
    ):
        assert not is_run(str(path)) and result_of_run(str(path)) == str(path)
    assert result_of_run(None) is None


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ('{"state": "interrupted"}', "interrupted.*cpt train .*first/recipe.yaml"),
        ('{"sta', "not started"),
        ('{"state": "finished"}', "lost its model"),
    ],
)
def test_a_run_without_a_model_is_refused_with_what_to_do(run_folder, status, said):
    (run_folder / "status.json").write_text(status)
    if "lost" in said:
        (run_folder / "final" / "config.json").unlink()
    assert result_of_run(str(run_folder)) == str(run_folder)
    with pytest.raises(RecipeError, match=f"model.path: .*first .*{said}"):
        load_config(Model(path=str(run_folder)))
    with pytest.raises(RecipeError, match=f"tokenizer.path`: .*first .*{said}"):
        from_folder_or_hub(str(run_folder), None, False)


def test_a_run_that_has_not_finished_is_a_blocker_and_no_mistake(run_folder, tiny_recipe, tmp_path):
    (run_folder / "status.json").write_text('{"state": "running"}')
    found = check_reality(recipe_of(run_folder, tiny_recipe, tmp_path))
    assert found.mistakes == [] and "not finished" in str(found.blockers[0])
