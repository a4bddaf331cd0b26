"""Sizes that accelerate's own config names are held against the recipe's."""

import pytest

from cpt.errors import LaunchError
from cpt.launchers.agree_on_parallelism import agree_on_parallelism


@pytest.fixture
def started_with_two(monkeypatch):
    """As `accelerate launch` does where its config says so."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SIZE", "2")


def test_sizes_that_the_recipe_does_not_have_are_refused(started_with_two):
    with pytest.raises(
        LaunchError, match="started with sp_size 2, and the recipe's `training.parallelism_config.sp_size` is 1"
    ):
        agree_on_parallelism({})


def test_the_same_sizes_agree(started_with_two):
    agree_on_parallelism({"parallelism_config": {"sp_size": 2}})


def test_other_launches_say_nothing():
    agree_on_parallelism({"parallelism_config": {"sp_size": 2}})
