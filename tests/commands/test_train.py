"""`cpt train`, and `cpt recipes`, which it starts from."""

import pytest
from tiny import write_recipe

from cpt.commands.train import check_and_train
from cpt.errors import RecipeError, ResourceError
from cpt.recipe.load import load_recipe
from cpt.train import train


@pytest.mark.parametrize("section", [{"model": {"path": "lab/never"}}, {"tokenizer": {"path": "lab/never"}}])
def test_without_the_hub_a_model_is_refused_before_a_run_is_made(tiny_recipe, tmp_path, section):
    recipe = load_recipe(write_recipe({**tiny_recipe, **section}, tmp_path / "r.yaml"))
    with pytest.raises(ResourceError, match="hf download lab/never"):
        check_and_train(recipe)
    assert not (tmp_path / "runs" / "tiny").exists()


def test_train_names_the_keys_that_are_still_auto(tiny_recipe, tmp_path):
    tiny_recipe["training"]["per_device_train_batch_size"] = "auto"
    recipe = load_recipe(write_recipe(tiny_recipe, tmp_path / "r.yaml"))
    with pytest.raises(RecipeError, match="`training.per_device_train_batch_size`"):
        train(recipe)
