import pytest

from cpt.errors import RecipeError
from cpt.recipe.keys import AUTOMATIC, automatic_keys
from cpt.recipe.load import load_recipe
from tests.tiny import write_recipe


def test_the_keys_that_say_auto():
    assert automatic_keys({"per_device_train_batch_size": "auto", "bf16": True, "logging_steps": 5}) == [
        "per_device_train_batch_size"
    ]
    assert automatic_keys({}) == []


def test_auto_is_taken_by_the_keys_that_a_plan_can_fill_and_by_no_others(tiny_recipe, tmp_path):
    budget = {"tokens": 4096, "global_batch_tokens": 256}
    training = dict.fromkeys(AUTOMATIC, "auto")
    training.pop("activation_checkpointing")  # transformers' new name of the same switch
    loaded = load_recipe(
        write_recipe({**tiny_recipe, "budget": budget, "training": training}, tmp_path / "recipe.yaml")
    )
    assert loaded.training == training
    with pytest.raises(RecipeError, match="max_grad_norm"):
        load_recipe(write_recipe({**tiny_recipe, "training": {"max_grad_norm": "auto"}}, tmp_path / "wrong.yaml"))


@pytest.mark.parametrize("key", ["per_device_train_batch_size", "gradient_accumulation_steps"])
def test_the_tokens_of_a_step_do_not_depend_on_what_fits(tiny_recipe, tmp_path, key):
    sections = {**tiny_recipe, "budget": {"tokens": 4096}, "training": {key: "auto"}}
    with pytest.raises(RecipeError, match="global_batch_tokens"):
        load_recipe(write_recipe(sections, tmp_path / "recipe.yaml"))
