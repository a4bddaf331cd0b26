import json

import pytest

from cpt.errors import CheckpointError, DataError, RecipeError
from cpt.recipe.schema import Recipe
from cpt.runs.record import Run, start_run


def recipe(folder, **changes):
    sections = {
        "name": "a-run",
        "output_dir": folder,
        "model": {"path": "some/model"},
        "data": {"sources": [{"path": "a.txt"}]},
        "budget": {"tokens": 1000},
    }
    return Recipe.model_validate({**sections, **changes})


def test_a_run_starts_with_its_recipe_and_environment_on_record(tmp_path):
    run = start_run(recipe(tmp_path))
    assert {path.name for path in run.folder.iterdir()} == {"recipe.yaml", "environment.json"}


def test_the_same_recipe_comes_back_to_its_folder(tmp_path):
    assert start_run(recipe(tmp_path)).folder == start_run(recipe(tmp_path, tags=["again"])).folder


def test_another_recipe_under_the_same_name_is_refused_with_what_differs(tmp_path):
    start_run(recipe(tmp_path))
    with pytest.raises(RecipeError, match=r"budget.tokens.*1000.*2000(.|\n)*--new"):
        start_run(recipe(tmp_path, budget={"tokens": 2000}))


def test_new_starts_beside_the_old_run(tmp_path):
    start_run(recipe(tmp_path))
    assert start_run(recipe(tmp_path), new=True).folder.name == "a-run-2"
    assert start_run(recipe(tmp_path), new=True).folder.name == "a-run-3"


def test_an_unwritable_output_folder_is_a_recipe_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RecipeError, match="cannot write"):
        start_run(recipe(tmp_path / "file"))


def test_the_status_tells_how_the_run_ended(tmp_path):
    run = Run(tmp_path)
    with pytest.raises(DataError), run.reporting():
        assert run.status()["state"] == "running"
        raise DataError("a.txt is empty")
    assert (run.status()["state"], run.status()["error"], run.status()["exit_code"]) == ("failed", "DataError", 2)
    with run.reporting():
        pass
    assert (run.status()["state"], run.status()["exit_code"]) == ("finished", 0)


def test_a_run_is_finished_only_with_its_exported_model(tmp_path):
    run = Run(tmp_path)
    with run.reporting():
        pass
    assert not run.is_finished
    run.export_folder.mkdir()
    (run.export_folder / "config.json").write_text("{}")
    assert run.is_finished


def test_changed_data_are_refused_on_the_way_back(tmp_path):
    run = Run(tmp_path)
    run.record_inputs("abc", lambda: {"data": {"fingerprint": "abc"}})
    run.record_inputs("abc", lambda: pytest.fail("described twice"))
    with pytest.raises(CheckpointError, match="began with other data"):
        run.record_inputs("def", dict)
    assert json.loads((tmp_path / "inputs.json").read_text())["data"]["fingerprint"] == "abc"
