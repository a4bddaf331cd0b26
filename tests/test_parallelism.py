"""What `training.parallelism_config` may say."""

import pytest

from cpt.distributed import Parallelism, groups_of_rows, read_parallelism
from cpt.errors import RecipeError


def test_a_recipe_without_it_shares_nothing():
    assert read_parallelism({}) == Parallelism()
    assert groups_of_rows({}, 8) == 8


def test_processes_that_share_rows_read_as_one():
    training = {"parallelism_config": {"sp_size": 4, "sp_backend": "deepspeed"}}
    assert read_parallelism(training).sp_size == 4
    assert groups_of_rows(training, 8) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sp_sise": 2}, "Did you mean `sp_size`"),
        ({"sp_size": 0}, "1 or more"),
        ({"sp_size": True}, "1 or more"),
        ({"sp_size": "2"}, "whole number"),
        ({"pp_size": 2}, "no schedule for stages"),
        (2, "keys and values"),
    ],
)
def test_what_nobody_would_understand_is_refused(given, message):
    with pytest.raises(RecipeError, match=message):
        read_parallelism({"parallelism_config": given})


@pytest.mark.parametrize("processes", [1, 2, 6])
def test_processes_that_cannot_be_divided_are_refused_with_their_number(processes):
    with pytest.raises(RecipeError, match=f"the run has {processes}: start a multiple of 4"):
        groups_of_rows({"parallelism_config": {"sp_size": 4}}, processes)
