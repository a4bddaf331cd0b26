import pytest

from cpt.data.components import build_components, module_text, name_of
from cpt.errors import RecipeError
from cpt.recipe.schema import Component


def shout(text, *, mark="!"):
    return text + mark


def test_functions_come_in_the_order_of_the_recipe_with_their_options():
    lists = {"a": [Component(name="shout"), Component(name="shout", mark="?")], "b": [Component(name="shout", mark=".")]}
    functions = build_components("filter", lists, {"shout": shout})
    assert [function("x") for function in functions] == ["x!", "x?", "x."]
    assert {name_of(function) for function in functions} == {"shout"}


def test_an_option_is_refused_with_its_place():
    with pytest.raises(RecipeError, match=r"`a\[1\].makr` is not an option of shout"):
        build_components("filter", {"a": [Component(name="shout"), Component(name="shout", makr="?")]}, {"shout": shout})


def test_the_text_is_that_of_the_whole_module():
    assert "def test_the_text_is_that_of_the_whole_module" in module_text("filter", "shout", {"shout": shout})


def test_code_that_is_in_no_file_is_refused():
    with pytest.raises(RecipeError, match="the filter `len` must be a function in a Python file"):
        module_text("filter", "len", {"len": len})
