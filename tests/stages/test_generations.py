import pytest
import trl

from cpt.data.rows.mixture import shift_past_skipped
from cpt.errors import RecipeError
from cpt.training.arguments import Generations, PromptRows, prompts_of_step

ROWS = [{"prompt": str(number)} for number in range(100)]


def numbers_of(plan, world_size, step, left_out=()):
    """The prompts that a step's micro-batches belong to, once each."""
    rows = PromptRows(ROWS, plan, world_size, list(left_out))
    items = range(step * plan.accumulation * world_size, (step + 1) * plan.accumulation * world_size)
    return list(dict.fromkeys(int(prompt["prompt"]) for item in items for prompt in rows[item]))


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Generations(prompts=4, micro_batches=2, accumulation=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Generations(prompts=4, micro_batches=4, accumulation=2), [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]),
        (Generations(prompts=2, micro_batches=1, accumulation=2), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
    ids=["one step each", "two steps each", "two in a step"],
)
def test_a_step_has_the_same_prompts_whatever_the_number_of_processes(plan, expected):
    for step, prompts in enumerate(expected):
        assert numbers_of(plan, 1, step) == prompts
        assert numbers_of(plan, 3, step) == prompts


def test_prompts_that_are_left_out_are_no_processes():
    plan = Generations(prompts=4, micro_batches=2, accumulation=2)
    assert (
        numbers_of(plan, 2, 1, left_out=[(4, 8)])
        == [8, 9, 10, 11]
        == [shift_past_skipped(row, [(4, 8)]) for row in range(4, 8)]
    )


def test_prompts_of_a_step_are_told_from_the_recipe_alone():
    assert prompts_of_step(trl.GRPOConfig, {}, 64) == 8
    assert prompts_of_step(trl.GRPOConfig, {"num_generations": 4, "num_iterations": 2}, 64) == 8


def test_no_whole_number_of_prompts_is_refused_with_what_to_change():
    with pytest.raises(RecipeError, match="be a multiple of 8"):
        prompts_of_step(trl.GRPOConfig, {}, 60)


def test_steps_and_generations_have_to_fit_into_each_other():
    with pytest.raises(RecipeError, match="be a multiple of the other"):
        Generations(prompts=6, micro_batches=3, accumulation=2).check()
    Generations(prompts=6, micro_batches=3, accumulation=6).check()
