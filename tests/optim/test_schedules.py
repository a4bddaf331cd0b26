import pytest
import torch

from cpt.errors import RecipeError
from cpt.optim.schedules import build_schedule, constant, cosine, linear
from cpt.recipe.schema import Schedule


def rates(section: Schedule, *, steps: int, tokens_per_step: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_schedule(section, optimizer, tokens_per_step=tokens_per_step, total_tokens=steps * tokens_per_step)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_rises_to_the_peak_and_ends_at_the_floor():
    assert cosine(50, 1000, warmup_tokens=100) == pytest.approx(0.5)
    assert cosine(100, 1000, warmup_tokens=100) == pytest.approx(1.0)
    assert cosine(550, 1000, warmup_tokens=100, floor=0.2) == pytest.approx(0.6)
    assert cosine(1000, 1000, warmup_tokens=100, floor=0.2) == pytest.approx(0.2)


def test_linear_falls_in_a_straight_line():
    assert [linear(tokens, 100, floor=0.0) for tokens in (0, 25, 50, 100)] == pytest.approx([1, 0.75, 0.5, 0])


def test_constant_stays_at_the_peak():
    assert constant(10, 100, warmup_tokens=10) == constant(100, 100, warmup_tokens=10) == 1.0


def test_the_curve_over_tokens_does_not_depend_on_the_batch():
    fine = rates(Schedule(name="cosine", warmup_tokens=200), steps=100, tokens_per_step=10)
    coarse = rates(Schedule(name="cosine", warmup_tokens=200), steps=50, tokens_per_step=20)
    assert coarse == pytest.approx(fine[1::2])


def test_no_step_is_wasted_at_a_rate_of_zero():
    assert min(rates(Schedule(name="linear", warmup_tokens=50, floor=0.1), steps=10, tokens_per_step=10)) > 0


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        (Schedule(name="cosin"), "Did you mean `cosine`"),
        (Schedule(name="cosine", warmup=3), "`schedule.warmup` is not an option of cosine"),
        (Schedule(name="cosine", warmup_tokens=10**9), "the whole run has"),
    ],
)
def test_a_wrong_schedule_is_a_recipe_error(section, complaint):
    with pytest.raises(RecipeError, match=complaint):
        rates(section, steps=2, tokens_per_step=10)
