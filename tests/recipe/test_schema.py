"""The schema's own promises: nothing is bent into shape, nothing changes, and it stays small."""

import pytest
from pydantic import ValidationError

from cpt.recipe.schema import Budget, Checkpoints, Keep, Model
from cpt.recipe.sections import all_keys


@pytest.mark.parametrize("values", [{"tokens": "3"}, {"tokens": True}, {"tokens": 1.5}, {"epochs": "1"}, {"tokens": 0}, {"nothing": 1}])
def test_values_are_not_bent_into_shape(values):
    with pytest.raises(ValidationError):
        Budget(**values)


def test_an_imported_family_is_written_import():
    assert Model.model_validate({"import": "my_lab.models"}).import_ == "my_lab.models"


def test_there_are_fewer_than_120_keys_of_our_own():
    assert len(set(all_keys())) < 120


def test_a_number_of_checkpoints_is_short_for_the_newest():
    assert Checkpoints().kept == Keep.model_validate({"name": "newest", "last": 3})
    assert Checkpoints(keep=5).kept == Keep.model_validate({"last": 5})
    assert Checkpoints(keep=None).kept is None
