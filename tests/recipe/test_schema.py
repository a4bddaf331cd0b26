"""The schema's own promises: nothing is bent into shape, nothing changes, and it stays small."""

import pytest
from pydantic import ValidationError

from cpt.recipe.schema import Budget, Component, Model, Optimizer
from cpt.recipe.sections import all_keys


@pytest.mark.parametrize("values", [{"tokens": "3"}, {"tokens": True}, {"tokens": 1.5}, {"epochs": "1"}, {"tokens": 0}, {"nothing": 1}])
def test_values_are_not_bent_into_shape(values):
    with pytest.raises(ValidationError):
        Budget(**values)


def test_sections_do_not_change():
    with pytest.raises(ValidationError):
        Model(path="a/b").path = "c/d"


def test_options_are_what_stands_beside_the_name():
    assert Optimizer(name="x", learning_rate=1.0, rho=2).options == {"rho": 2}
    assert Component(name="x").options == {}


def test_an_imported_family_is_written_import():
    assert Model.model_validate({"import": "my_lab.models"}).import_ == "my_lab.models"


def test_there_are_fewer_than_120_keys_of_our_own():
    assert len(set(all_keys())) < 120
