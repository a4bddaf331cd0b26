from dataclasses import replace

import pytest
from tiny import write_recipe

from cpt.errors import ResourceError
from cpt.hardware import count_cpu_cores
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.reproduce.again import environment_of, folder_for, repetition_of
from cpt.reproduce.record import Record


@pytest.fixture
def record(tiny_recipe, tmp_path):
    tiny_recipe["monitoring"] = {"trackers": ["tensorboard"]}
    tiny_recipe["checkpoints"] = {"every_steps": 4, "archive": str(tmp_path / "archive"), "average": 2}
    tiny_recipe["training"]["gradient_checkpointing"] = "auto"
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    environment = {"variables": {"OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "5"}, "hardware": {"gpus": []}}
    inputs = {"training": {"gradient_checkpointing": True, "deepspeed": {"zero_optimization": {"stage": 2}}}}
    return Record(tmp_path / "runs" / "tiny", recipe, environment, inputs, [])


def test_the_repetition_is_the_same_recipe_with_what_was_chosen_for_it(record):
    recipe = repetition_of(record)
    assert (recipe.name, recipe.output_dir, recipe.tags) == (
        "tiny-reproduced",
        record.folder.parent,
        ["reproduces tiny"],
    )
    assert recipe.training["gradient_checkpointing"] is True and recipe.training["use_cpu"] is True
    assert recipe.training["deepspeed"] == {"zero_optimization": {"stage": 2}}
    assert (recipe.data, recipe.budget, recipe.optimizer, recipe.seed) == (
        record.recipe.data,
        record.recipe.budget,
        record.recipe.optimizer,
        record.recipe.seed,
    )


def test_it_saves_as_the_run_did_and_tells_nobody(record):
    recipe = repetition_of(record)
    assert recipe.checkpoints.every_steps == 4
    assert recipe.checkpoints.archive is recipe.checkpoints.average is None and recipe.monitoring.trackers == []


def test_variables_that_decide_figures_are_as_they_were(record, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("HOME_OF_NOBODY", "kept")
    variables = environment_of(record)
    assert variables["OMP_NUM_THREADS"] == "3" and "CUBLAS_WORKSPACE_CONFIG" not in variables
    assert variables["CUDA_VISIBLE_DEVICES"] == "0" and variables["HOME_OF_NOBODY"] == "kept"


@pytest.mark.parametrize(
    ("cores", "threads"), [(count_cpu_cores(), None), (count_cpu_cores() + 3, str(count_cpu_cores() + 3))]
)
def test_on_other_cores_there_are_as_many_threads_as_then(record, monkeypatch, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = {"variables": {}, "hardware": {"gpus": [], "cores": cores}}
    assert environment_of(replace(record, environment=environment)).get("OMP_NUM_THREADS") == threads


def test_an_earlier_repetition_gives_way_and_nothing_else_does(record):
    recipe = repetition_of(record)
    folder = folder_for(recipe)
    folder.mkdir(parents=True)
    (folder / "precious").write_text("of somebody")
    with pytest.raises(ResourceError, match="in the way"):
        folder_for(recipe)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    assert folder_for(recipe) == folder and not folder.exists()
