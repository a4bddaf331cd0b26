import json

import pytest
from tiny_search import recipe_in

from cpt.errors import RecipeError
from cpt.optim.schedules import build_schedule
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.runs.record import Run
from cpt.search.figures import Tail
from cpt.search.range_test import (
    PICTURE,
    RESULT,
    Range,
    left_all_bounds,
    range_test,
    recipe_of_test,
    tokens_per_step,
    told,
)

WANTED = Range(1e-4, 10.0, 100, 100 * 256)


def falling_then_rising(count):
    return [(256 * step, 6 - 4 * min(1, step / 60) + max(0, step - 70) ** 2 / 50) for step in range(1, count + 1)]


def test_the_recipe_of_a_test_grows_its_learning_rate_and_hides_nothing(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(
        tmp_path, tiny_recipe, evaluation={"held_out_share": 0.1}, checkpoints={"every_steps": 1}
    )
    tested = recipe_of_test(recipe, root, WANTED, new=False)
    (tmp_path / "again.yaml").write_text(dump_recipe(tested))
    assert load_recipe(tmp_path / "again.yaml") == tested and tested.name == "tiny-learning-rates"
    assert (
        tested.safety.loss_guard is None
        and tested.evaluation.held_out_share is None
        and tested.checkpoints.every_steps is None
    )
    assert tested.budget.tokens == 100 * 256 and tested.training["logging_steps"] == 1


def test_the_schedule_of_the_run_is_the_curves(tiny_recipe, tmp_path):
    import torch

    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    tested = recipe_of_test(recipe, root, WANTED, new=False)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=tested.optimizer.learning_rate)
    schedule = build_schedule(tested.schedule, optimizer, tokens_per_step=256, total_tokens=WANTED.tokens)
    for step in range(1, 4):
        assert schedule.get_last_lr()[0] == pytest.approx(WANTED.learning_rate(256 * step))
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize(("low", "high"), [(1e-2, 1e-6), (0.0, 1.0), (-1.0, 1.0), (1e-3, float("inf"))])
def test_bounds_that_cannot_be_are_refused(tiny_recipe, tmp_path, low, high):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    with pytest.raises(RecipeError, match="two numbers above 0, the lower one first"):
        range_test(recipe, root, low, high, steps=100)


def test_the_tokens_of_a_step_are_the_recipes(tiny_recipe, tmp_path):
    _, recipe, _ = recipe_in(tmp_path, tiny_recipe)
    assert tokens_per_step(recipe, 2) == 256
    _, without, _ = recipe_in(tmp_path, tiny_recipe, budget={"tokens": 2048})
    assert tokens_per_step(without, 3) == 64 * 2 * 3
    training = {**tiny_recipe["training"], "per_device_train_batch_size": "auto"}
    _, unknown, _ = recipe_in(tmp_path, tiny_recipe, training=training)
    assert tokens_per_step(unknown, 1) == 256
    with pytest.raises(RecipeError, match=r"write `budget.global_batch_tokens`"):
        tokens_per_step(unknown.model_copy(update={"budget": without.budget}), 1)


def test_a_loss_that_left_all_bounds_ends_the_test(tmp_path):
    tail = Tail(tmp_path, "loss")
    assert not left_all_bounds(falling_then_rising(80), tail) and left_all_bounds(falling_then_rising(100), tail)
    tail.last = float("nan")
    assert left_all_bounds(falling_then_rising(30), tail) and not left_all_bounds([], tail)


def test_what_was_found_is_told_with_its_rule_and_drawn(tmp_path, capsys):
    content = {"low": 1e-4, "high": 10.0, "steps": 100, "tokens": 25_600, "losses": falling_then_rising(100)}
    (tmp_path / RESULT).write_text(json.dumps(content))
    curve = told(Run(tmp_path), WANTED)
    said = capsys.readouterr().out
    assert (
        f"optimizer.learning_rate={curve.suggested:g}" in said
        and "arXiv 1506.01186" in said
        and (tmp_path / PICTURE).exists()
    )


def test_another_test_in_the_folder_is_not_taken_for_this_one(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    folder = tmp_path / "runs" / "tiny-learning-rates"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(dump_recipe(recipe_of_test(recipe, root, WANTED, new=False)))
    with pytest.raises(
        RecipeError, match=r"holds another range test.*\n  budget.tokens: 25600 -> 51200\nStart anew beside it: --new"
    ):
        range_test(recipe, root, 1e-4, 10.0, steps=200)


def test_a_test_that_did_not_diverge_suggests_nothing(tmp_path, capsys):
    content = {"low": 1e-4, "high": 10.0, "steps": 100, "tokens": 25_600, "losses": falling_then_rising(60)}
    (tmp_path / RESULT).write_text(json.dumps(content))
    assert told(Run(tmp_path), WANTED).suggested is None
    assert "did not diverge up to 10" in capsys.readouterr().out


@pytest.mark.long
def test_on_a_tiny_model_a_rate_that_is_too_high_diverges(tiny_recipe, tmp_path, capsys):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    curve = range_test(recipe, root, 1e-4, 30, steps=120)
    assert curve.diverges is not None and 1e-4 < curve.suggested < curve.learning_rates[curve.lowest] < 1
    run = Run(tmp_path / "runs" / "tiny-learning-rates")
    assert not list(run.folder.glob("checkpoint-*")) and not run.export_folder.exists(), (
        "weights that were spoilt on purpose"
    )
    before = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    assert range_test(recipe, root, 1e-4, 30, steps=120).suggested == curve.suggested
    assert (run.folder / "metrics.jsonl").stat().st_mtime_ns == before, "read, not run again"
