"""A run that keeps documents apart by their bounds learns what it would learn with masks."""

from tiny import write_recipe

from cpt.data.rows.build import build_data
from cpt.models.attention import BOUNDS, LONGEST
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer


def trainer_of(sections, folder, attention):
    sections = {**sections, "name": attention, "model": {**sections["model"], "attention": attention}}
    recipe = load_recipe(write_recipe(sections, folder / f"{attention}.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed, evaluation=recipe.evaluation)
    return build_trainer(recipe, build_model(recipe.model, tokenizer, seed=recipe.seed, packed=True), tokenizer, data)


def test_other_runs_get_the_batches_that_they_had(tiny_recipe, tmp_path):
    plain, packed = (
        next(iter(trainer_of(tiny_recipe, tmp_path, name).get_train_dataloader())).keys()
        for name in ("sdpa", "varlen")
    )
    assert plain == {"input_ids", "labels", "position_ids"} and packed - plain == {BOUNDS, LONGEST}
