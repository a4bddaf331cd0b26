"""Processes that share rows: what goes together with it, and what is refused with the way out."""

import pytest
from tiny_models import TINY
from transformers import AutoConfig

from cpt.errors import RecipeError
from cpt.models.inventory import build_on_meta
from cpt.recipe.schema import Recipe
from cpt.training.arguments import check_parallelism, parallelism_config, run_length

ZERO2 = {"zero_optimization": {"stage": 2}}


def recipe_with(parallelism, **sections):
    """A recipe for a llama that keeps documents apart by their bounds."""
    training = {"parallelism_config": parallelism, **sections.pop("training", {})}
    return Recipe.model_validate(
        {
            "name": "tiny",
            "stage": "cpt",
            "model": {"path": "base", "attention": "varlen"},
            "data": {"sequence_length": 64, "sources": [{"path": "a.jsonl"}]},
            "budget": {"tokens": 4096},
            "training": {"per_device_train_batch_size": 2, **training},
            **sections,
        }
    )


def check(recipe, *, profile=ZERO2, model_type="llama", processes=2):
    model = build_on_meta(AutoConfig.for_model(model_type, **TINY[model_type]))
    check_parallelism(recipe, profile, model, processes=processes, elsewhere=False)


def test_shared_rows_under_zero_are_accepted():
    check(recipe_with({"sp_size": 2}))
    check(recipe_with({"sp_size": 2}), processes=1)  # nobody has started it yet


@pytest.mark.parametrize(
    ("parallelism", "message"),
    [
        ({"tp_size": 2}, "ZeRO-3"),
        ({"cp_size": 2}, "Use `sp_size`"),
        ({"dp_shard_size": 2}, "zero_hpz_partition_size"),
        ({"sp_size": 3}, "does not divide `data.sequence_length` 64"),
        ({"sp_size": 4}, "start a multiple of 4"),
    ],
)
def test_other_sizes_are_refused_with_the_way_out(parallelism, message):
    with pytest.raises(RecipeError, match=message):
        check(recipe_with(parallelism), processes=6 if parallelism != {"sp_size": 3} else 3)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"data": {"sequence_length": 64, "packing": "token_budget", "sources": [{"path": "a.jsonl"}]}},
            "token_budget",
        ),
        ({"model": {"path": "base", "attention": "sdpa"}}, "mixes documents of one row"),
        ({"training": {"torch_compile": True}}, "compiled layers"),
        ({"stage": "dpo"}, "needs whole rows"),
    ],
)
def test_what_would_train_something_else_is_refused(sections, message):
    with pytest.raises(RecipeError, match=message):
        check(recipe_with({"sp_size": 2}, **sections))


@pytest.mark.parametrize("profile", [None, {"zero_optimization": {"stage": 0}}])
def test_without_zero_nobody_shares_rows(profile):
    with pytest.raises(RecipeError, match="ZeRO-1, 2 or 3"):
        check(recipe_with({"sp_size": 2}), profile=profile)


def test_models_that_were_not_compared_are_refused():
    with pytest.raises(RecipeError, match="deepseek_v3 learns the same"):
        check(recipe_with({"sp_size": 2}), model_type="deepseek_v3")


def test_accelerate_is_told_of_groups(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = parallelism_config({"parallelism_config": {"sp_size": 2}})
    assert (config.sp_size, config.data_parallel_size, config.non_data_parallel_size) == (2, 4, 2)
    assert parallelism_config({}) is None


def test_a_step_has_the_rows_of_groups(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    length = run_length(recipe_with({"sp_size": 2}), 10_000)
    assert (length.rows_per_step, length.tokens_per_step) == (2 * 4, 2 * 4 * 64)
