"""`cpt recipes` lists what comes with cpt, and copies it."""

import pytest

from cpt.commands.recipes import command
from cpt.errors import ResourceError
from cpt.installation import SHIPPED_FILES
from cpt.recipe.load import load_recipe


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "launch").mkdir()
    with pytest.raises(ResourceError, match="launch exists there already"):
        command(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]


def test_a_recipe_far_from_the_clone_may_name_its_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nmodel: models/gpt2/124m.yaml\nbudget: {tokens: 1000}\ndata: {sequence_length: 128, sources:"
        " [{path: texts}]}\ntraining: {deepspeed: deepspeed_configs/ds_config_zero1.json}\n"
    )
    recipe = load_recipe("mine.yaml")
    assert recipe.model.path == "openai-community/gpt2"
    assert recipe.training["deepspeed"] == str(SHIPPED_FILES / "deepspeed_configs/ds_config_zero1.json")
