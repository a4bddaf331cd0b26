import math
from itertools import pairwise

import pytest
import torch

from cpt.errors import RecipeError
from cpt.optim.schedules import build_schedule, constant, continued, cosine, infinite, linear, rewarm_cosine, wsd
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


def test_rewarming_starts_where_the_base_ended():
    section = {"warmup_tokens": 100, "start": 0.2, "floor": 0.1}
    assert [rewarm_cosine(tokens, 1100, **section) for tokens in (0, 50, 100, 600, 1100)] == pytest.approx([0.2, 0.6, 1.0, 0.55, 0.1])


def test_rewarming_from_nothing_is_the_cosine():
    for tokens in range(0, 1001, 7):
        assert rewarm_cosine(tokens, 1000, warmup_tokens=100) == pytest.approx(cosine(tokens, 1000, warmup_tokens=100))


def test_wsd_stays_until_the_decay_and_then_falls_by_a_square_root():
    section = {"warmup_tokens": 100, "decay_tokens": 200}
    assert [wsd(tokens, 1000, **section) for tokens in (50, 100, 500, 800)] == [0.5, 1.0, 1.0, 1.0]
    assert [wsd(tokens, 1000, **section) for tokens in (850, 900, 1000)] == pytest.approx([0.5, 1 - math.sqrt(0.5), 0.0])
    assert wsd(1000, 1000, **section, floor=0.1) == pytest.approx(0.1)


def test_infinite_cools_down_to_a_constant_rate_and_anneals_exponentially():
    section = {"warmup_tokens": 100, "cooldown_tokens": 400, "anneal_tokens": 200, "constant": 0.4, "floor": 0.1}
    assert [infinite(tokens, 1000, **section) for tokens in (50, 100, 300, 500, 650, 800)] == pytest.approx([0.5, 1, 0.7, 0.4, 0.4, 0.4])
    assert [infinite(tokens, 1000, **section) for tokens in (900, 1000)] == pytest.approx([0.2, 0.1])


SECTIONS = [
    {"name": "constant", "warmup_tokens": 60},
    {"name": "rewarm_cosine", "warmup_tokens": 60, "start": 0.3},
    {"name": "wsd", "warmup_tokens": 60, "decay_tokens": 200},
    {"name": "infinite", "warmup_tokens": 60, "cooldown_tokens": 300, "anneal_tokens": 100},
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["name"])
def test_two_runs_of_which_one_continues_the_other_have_the_rates_of_one_long_run(section):
    whole = rates(Schedule(**section), steps=100, tokens_per_step=10)
    rest = Schedule(name="continued", schedule=section, trained_tokens=400)
    assert rates(rest, steps=60, tokens_per_step=10) == whole[40:]


def test_a_branch_of_the_constant_part_may_end_earlier_than_was_planned():
    section = {"name": "infinite", "warmup_tokens": 60, "cooldown_tokens": 300, "anneal_tokens": 100}
    branch = {"schedule": section, "trained_tokens": 500}
    assert continued(300, 300, **branch) == pytest.approx(0.1)
    assert continued(300, 300, **branch, planned_tokens=2000) == pytest.approx(0.5)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section["name"])
def test_no_schedule_jumps(section):
    """Against a reference that needs no formula: neighbours on a fine grid are close, and all lie between 0 and the peak."""
    fine = rates(Schedule(**section), steps=2000, tokens_per_step=1)
    assert all(0 <= rate <= 2 for rate in fine)
    assert max(abs(after - before) for before, after in pairwise(fine)) <= 2 * math.sqrt(1 / 200) + 1e-9  # where a square root begins


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
        (Schedule(name="wsd", warmup_tokens=11, decay_tokens=10), "warmup_tokens` is 11 and `schedule.decay_tokens` is 10, but the whole"),
        (Schedule(name="wsd"), "`schedule` needs `decay_tokens`"),
        (Schedule(name="continued", schedule={"name": "wds"}, trained_tokens=5), "Did you mean `wsd`"),
        (Schedule(name="continued", schedule={"name": "wsd"}, trained_tokens=5), "`schedule.schedule` needs `decay_tokens`"),
    ],
)
def test_a_wrong_schedule_is_a_recipe_error(section, complaint):
    with pytest.raises(RecipeError, match=complaint):
        rates(section, steps=2, tokens_per_step=10)
