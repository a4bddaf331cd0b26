"""`cpt recipes` lists what comes with cpt, and copies it."""

import pytest

from cpt.errors import ResourceError
from cpt.recipe.load import load_recipe
from cpt.recipes_command import command
from cpt.shipped import SHIPPED_FILES


def test_every_run_is_listed_with_what_its_file_says_of_it(capsys):
    command()
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[lines.index("recipes/prototype_rtx4090.yaml") + 1]
        .strip()
        .startswith("Continued pre-training of an 8B model on one RTX 4090")
    )
    assert not any(line.startswith(("recipes/models", "recipes/mixtures", "recipes/presets")) for line in lines)


def test_the_copy_is_what_came_and_its_recipes_can_be_read(tmp_path, monkeypatch, capsys):
    command(tmp_path / "mine")
    assert "cpt check recipes/tiny/pretrain.yaml" in capsys.readouterr().out
    copied = {path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*.yaml")}
    folders = ("recipes", "deepspeed_configs", "launch")
    assert copied == {
        path.relative_to(SHIPPED_FILES) for folder in folders for path in (SHIPPED_FILES / folder).rglob("*.yaml")
    }
    monkeypatch.chdir(tmp_path / "mine")
    assert load_recipe("recipes/tiny/pretrain.yaml").name == "tiny-pretrain"


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "launch").mkdir()
    with pytest.raises(ResourceError, match="launch exists there already"):
        command(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="--copy FOLDER"):
        command(tmp_path / "file" / "inside")


def test_a_recipe_far_from_the_clone_may_name_its_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: models/gpt2/124m.yaml\nbudget: {tokens: 1000}\ndata: {sequence_length: 128, sources:"
        " [{path: texts}]}\ntraining: {deepspeed: deepspeed_configs/ds_config_zero1.json}\n"
    )
    recipe = load_recipe("mine.yaml")
    assert recipe.model.path == "openai-community/gpt2"
    assert recipe.training["deepspeed"] == str(SHIPPED_FILES / "deepspeed_configs/ds_config_zero1.json")
