"""A stage's columns are read from its source, without importing it."""

import sys

import pytest

from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import STAGE_CONFIGS, columns_of_stage
from cpt.training.arguments import find_stage


@pytest.mark.parametrize("stage", STAGE_CONFIGS)
def test_they_are_those_of_the_module(stage):
    assert columns_of_stage(stage) == tuple(find_stage(stage).COLUMNS)


def test_those_of_a_users_stage_are_found_where_it_imports_them_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_lab_parts.py").write_text('COLUMNS = ("prompt", "chosen", "rejected")\n')
    (tmp_path / "own_lab.py").write_text("from own_lab_parts import COLUMNS\nraise AssertionError('imported')\n")
    assert columns_of_stage("own_lab") == ("prompt", "chosen", "rejected") and "own_lab" not in sys.modules


def test_a_stage_that_does_not_show_them_is_told_what_to_write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hidden.py").write_text("COLUMNS = tuple('abc')\n")
    with pytest.raises(
        RecipeError, match=r"`stage`: `hidden` must say which columns its examples have, as in COLUMNS = \("
    ):
        columns_of_stage("hidden")


def test_a_package_that_is_not_there_is_told():
    with pytest.raises(RecipeError, match="`stage`: the package `nowhere_lab` is not installed"):
        columns_of_stage("nowhere_lab.stage")
