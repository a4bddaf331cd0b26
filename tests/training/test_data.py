"""A run's data have the form of its stage."""

import pytest
from tiny_tasks import TINY

from cpt.recipe.load import load_recipe
from cpt.tokenizer.load import load_tokenizer
from cpt.training.arguments import data_of


@pytest.mark.parametrize(
    ("stage", "form", "keys"),
    [("sft", "conversation", {"input_ids", "labels", "position_ids"}), ("grpo", "prompt", {"prompt", "answer"})],
)
def test_rows_are_what_the_stage_trains_on(stage, form, keys):
    recipe = load_recipe(TINY / f"{stage}.yaml")
    data = data_of(recipe, load_tokenizer(recipe.tokenizer, recipe.model))
    assert data.form == form and {*data.rows[0]} == keys
