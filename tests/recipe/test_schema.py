"""The schema's own promises: nothing is bent into shape, nothing changes, and it stays small."""

import pytest
from pydantic import ValidationError

from cpt.recipe.schema import Budget, Component, Model, Optimizer, whole_number
from cpt.recipe.sections import all_keys


@pytest.mark.parametrize("values", [{"tokens": "3"}, {"tokens": True}, {"tokens": 1.5}, {"epochs": "1"}, {"tokens": 0}, {"nothing": 1}])
def test_values_are_not_bent_into_shape(values):
    with pytest.raises(ValidationError):
        Budget(**values)


@pytest.mark.parametrize(
    ("written", "number"), [("500M", 5 * 10**8), ("1.5B", 1_500_000_000), ("2T", 2 * 10**12), ("20GB", 2 * 10**10), ("10k", 10_000)]
)
def test_numbers_may_have_a_suffix(written, number):
    assert Budget(tokens=written).tokens == number


@pytest.mark.parametrize("written", ["1.5", "0.0001k", "3", "B", "1X", "-1M"])
def test_a_text_that_is_no_such_number_is_refused(written):
    with pytest.raises(ValidationError):
        Budget(tokens=written)


def test_a_whole_float_is_a_whole_number():
    assert Budget(tokens=1e9).tokens == 10**9 and whole_number(1.5) == 1.5


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
