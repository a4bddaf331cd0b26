import pytest

from cpt.data.form_of_stage import form_of_stage, sections_of
from cpt.data.forms import form_of_source
from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe


@pytest.mark.parametrize(
    ("stage", "form"), [("cpt", "document"), ("pretrain", "document"), ("sft", "conversation"), ("dpo", "preference")]
)
def test_a_stage_says_its_form(stage, form):
    assert form_of_stage(stage) == form


def test_the_sections_of_a_recipe_know_the_form_of_its_stage():
    content = {
        "name": "a",
        "stage": "sft",
        "model": {"path": "m"},
        "data": {"sources": [{"path": "a.jsonl"}]},
        "budget": {"epochs": 1},
    }
    data, _ = sections_of(Recipe.model_validate(content))
    assert form_of_source(data.sources[0]) == "conversation"
    content["data"]["packing"] = "concatenate"
    with pytest.raises(RecipeError, match="`data.packing: concatenate` is for documents"):
        sections_of(Recipe.model_validate(content))
