import pytest
from tiny import write_recipe
from transformers import TrainerCallback

from cpt.checkpoints.resume import published_checkpoints
from cpt.data.rows.build import build_data
from cpt.models.build import build_model
from cpt.recipe.load import load_recipe
from cpt.runs.events import read_events
from cpt.stages.build import build_trainer
from cpt.tokenizer.load import load_tokenizer
from cpt.training.liveness import saved_on_errors


class Fails(TrainerCallback):
    """At step 5: while it is made, or after it."""

    def __init__(self, moment):
        self.moment = moment

    def on_pre_optimizer_step(self, args, state, control, **_):
        if self.moment == "within" and state.global_step == 4:
            raise ValueError("a bug")

    def on_log(self, args, state, control, **_):
        if self.moment == "between" and state.global_step == 5:
            raise ValueError("a bug")


def failing_run(sections, folder, moment, **checkpoints):
    recipe = load_recipe(write_recipe({**sections, "checkpoints": checkpoints}, folder / "recipe.yaml"))
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    data = build_data(recipe.data, tokenizer, seed=recipe.seed)
    run = recipe.output_dir / recipe.name
    run.mkdir(parents=True)
    watchers = [Fails(moment)]
    trainer = build_trainer(
        recipe, build_model(recipe.model, tokenizer, seed=recipe.seed), tokenizer, data, watchers=watchers
    )
    with pytest.raises(ValueError, match="a bug"), saved_on_errors(trainer):
        trainer.train()
    return [checkpoint.name for checkpoint in published_checkpoints(run)], read_events(run)[-1]["message"]


def test_an_error_between_two_steps_saves_the_last_one(tiny_recipe, tmp_path):
    names, message = failing_run(tiny_recipe, tmp_path, "between", every_steps=3)
    assert names == ["checkpoint-3", "checkpoint-5"]
    assert "failed after step 5: ValueError: a bug" in message and "resumes from checkpoint-5" in message


@pytest.mark.slow
def test_an_error_within_a_step_names_the_checkpoint_that_there_is(tiny_recipe, tmp_path):
    names, message = failing_run(tiny_recipe, tmp_path, "within", every_steps=3)
    assert names == ["checkpoint-3"] and "resumes from checkpoint-3" in message


def test_without_a_checkpoint_it_says_so(tiny_recipe, tmp_path):
    names, message = failing_run(tiny_recipe, tmp_path, "within")
    assert names == [] and "Nothing was saved yet" in message
