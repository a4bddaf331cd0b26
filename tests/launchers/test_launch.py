from pathlib import Path

from tiny_launch import launch_of

from cpt.launchers.attempts import TRAIN


def test_paths_below_the_work_folder_are_relative_to_it(tmp_path):
    launch = launch_of(tmp_path)
    assert launch.shown(tmp_path / "a" / "b c") == "'a/b c'" and launch.shown(Path("/etc/hosts")) == "/etc/hosts"


def test_what_was_typed_behind_the_recipe_is_quoted(tmp_path):
    launch = launch_of(tmp_path, overrides=("description=it's mine",), lora=True)
    assert launch.recipe_words() == """recipe.yaml 'description=it'"'"'s mine' --lora"""
    assert launch.train_words() == f"{TRAIN} {launch.recipe_words()}"


def test_the_check_of_the_cluster_knows_no_lora(tmp_path):
    assert launch_of(tmp_path, lora=True).compared_words() == "recipe.yaml"


def test_scripts_find_the_way_back(tmp_path):
    assert launch_of(tmp_path).way_back().endswith("/../..")
    assert launch_of(tmp_path, folder=tmp_path / "x").way_back().endswith("/..")


def test_the_runs_folder_is_the_recipes(tmp_path):
    assert launch_of(tmp_path).run_folder == "runs/tiny"
    assert launch_of(tmp_path, overrides=("output_dir=/shared/runs",)).run_folder == "/shared/runs/tiny"
