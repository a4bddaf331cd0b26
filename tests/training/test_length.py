import pytest

from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe
from cpt.training.arguments import run_length, warn_of_rounding
from cpt.training.restart import remember_micro_batch


def recipe(**changes):
    sections = {
        "name": "a-run",
        "model": {"path": "some/model"},
        "data": {"sequence_length": 64, "sources": [{"path": "a.txt"}]},
        "budget": {"tokens": 10_000, "global_batch_tokens": 512},
        "training": {"per_device_train_batch_size": 2},
    }
    return Recipe.model_validate({**sections, **changes})


def test_the_budget_is_rounded_up_to_whole_steps():
    length = run_length(recipe(), 0)
    assert (length.steps, length.rows_per_step, length.gradient_accumulation_steps, length.tokens) == (
        20,
        8,
        4,
        10_240,
    )


@pytest.mark.parametrize(("tokens", "is_told"), [(100, True), (10_000, False)])
def test_a_budget_of_less_than_its_steps_is_told(caplog, tokens, is_told):
    short = recipe(budget={"tokens": tokens, "global_batch_tokens": 512})
    warn_of_rounding(short, run_length(short, 0))
    assert ("The run trains 512 tokens in 1 step(s) of 512, more than `budget.tokens`: 100." in caplog.text) is is_told


def test_the_same_global_batch_on_more_processes_needs_less_accumulation(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    length = run_length(recipe(), 0)
    assert (length.steps, length.rows_per_step, length.gradient_accumulation_steps) == (20, 8, 1)


def test_epochs_are_passes_over_all_sources():
    assert run_length(recipe(budget={"epochs": 1.5, "global_batch_tokens": 512}), 80).steps == 15


def test_a_global_batch_that_does_not_divide_is_refused_with_the_figures():
    with pytest.raises(RecipeError, match="500.*multiple"):
        run_length(recipe(budget={"tokens": 1000, "global_batch_tokens": 500}), 0)


def test_a_micro_batch_that_was_learned_to_fit_keeps_the_global_batch(tmp_path, monkeypatch):
    remember_micro_batch(tmp_path, 2, 2)
    large = recipe(training={"per_device_train_batch_size": 4})
    alone = run_length(large, 0, tmp_path)
    assert (alone.micro_batch, alone.gradient_accumulation_steps) == (4, 2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    together = run_length(large, 0, tmp_path)
    assert (together.micro_batch, together.gradient_accumulation_steps, together.rows_per_step) == (2, 2, 8)


def test_a_learned_micro_batch_holds_only_where_it_divides_the_recipes(tmp_path):
    remember_micro_batch(tmp_path, 1, 4)
    length = run_length(recipe(), 0, tmp_path)
    assert (length.micro_batch, length.gradient_accumulation_steps) == (2, 4)


def test_an_interval_below_1_is_a_share_of_the_steps():
    length = run_length(recipe(), 0)
    assert [length.steps_between(None, every) for every in (None, 3, 0.25, 0.26, 0.001)] == [None, 3, 5, 6, 1]
