import pytest
from pydantic import ValidationError

from cpt.recipe.schema import Model, Optimizer
from cpt.recipe.section import Component


def test_sections_do_not_change():
    with pytest.raises(ValidationError):
        Model(path="a/b").path = "c/d"


def test_options_are_what_stands_beside_the_name():
    assert Optimizer(name="x", learning_rate=1.0, rho=2).options == {"rho": 2}
    assert Component(name="x").options == {}
