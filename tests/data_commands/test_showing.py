import pytest

from cpt.data_commands.check import chosen_sources
from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe


def test_a_source_is_chosen_by_its_name():
    sources = [{"path": "a/one.jsonl"}, {"path": "b.jsonl", "name": "two"}]
    recipe = Recipe.model_validate({"name": "x", "model": {"path": "m"}, "data": {"sources": sources}, "budget": {}})
    assert [one.path for _, one in chosen_sources(recipe, None)] == ["a/one.jsonl", "b.jsonl"]
    assert [key for key, _ in chosen_sources(recipe, "two")] == ["data.sources[1]"]
    with pytest.raises(RecipeError, match="Did you mean `two`"):
        list(chosen_sources(recipe, "tow"))
