import pytest

from cpt.errors import RecipeError
from cpt.planner.fitted import write_fitted
from cpt.recipe.load import load_recipe

RECIPE = """\
# a comment at the top
name: run
model: {path: base}          # where it starts
data:
  sources:
    - {path: documents, weight: 0.5}   # mine
budget: {tokens: 1_000_000}
optimizer: {name: adamw, learning_rate: 1e-5}
training:
  per_device_train_batch_size: 8   # rows
"""
CHANGES = {"training.per_device_train_batch_size": 2, "training.gradient_checkpointing": True, "model.lora": {"r": 16}}


@pytest.fixture
def recipe(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE)
    return file


def test_comments_stay_and_keys_change(recipe):
    write_fitted(recipe, recipe.parent / "fitted.yaml", (), CHANGES)
    text = (recipe.parent / "fitted.yaml").read_text()
    assert all(
        comment in text for comment in ("# a comment at the top", "# where it starts", "# mine", "# rows", "1_000_000")
    )
    fitted = load_recipe(recipe.parent / "fitted.yaml")
    assert fitted.training == {
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": True,
    } and fitted.model.lora == {"r": 16}
    assert fitted.optimizer == load_recipe(recipe).optimizer


def test_elsewhere_or_with_overrides_every_key_is_written(recipe, tmp_path):
    write_fitted(recipe, tmp_path / "there" / "fitted.yaml", ["seed=7"], CHANGES)
    fitted = load_recipe(tmp_path / "there" / "fitted.yaml")
    assert fitted.seed == 7 and fitted.training["gradient_checkpointing"]


def test_a_file_is_not_written_over(recipe):
    with pytest.raises(RecipeError):
        write_fitted(recipe, recipe, (), CHANGES)
    write_fitted(recipe, recipe, (), CHANGES, force=True)
    assert load_recipe(recipe).model.lora == {"r": 16}
