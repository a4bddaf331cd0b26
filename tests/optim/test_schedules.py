import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpt.errors import RecipeError
from cpt.optim.schedules import (
    SCHEDULES,
    build_schedule,
    constant,
    cosine,
    infinite,
    linear,
    rewarm_cosine,
    wsd,
)
from cpt.recipe.schema import Schedule


def rates(section: Schedule, *, steps: int, tokens_per_step: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = build_schedule(
        section, optimizer, tokens_per_step=tokens_per_step, total_tokens=steps * tokens_per_step
    )
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


def test_rewarming_starts_where_the_base_ended():
    section = {"warmup_tokens": 100, "start": 0.2, "floor": 0.1}
    assert [rewarm_cosine(tokens, 1100, **section) for tokens in (0, 50, 100, 600, 1100)] == pytest.approx(
        [0.2, 0.6, 1.0, 0.55, 0.1]
    )


def test_wsd_stays_until_the_decay_and_then_falls_by_a_square_root():
    section = {"warmup_tokens": 100, "decay_tokens": 200}
    assert [wsd(tokens, 1000, **section) for tokens in (50, 100, 500, 800)] == [0.5, 1.0, 1.0, 1.0]
    assert [wsd(tokens, 1000, **section) for tokens in (850, 900, 1000)] == pytest.approx(
        [0.5, 1 - math.sqrt(0.5), 0.0]
    )
    assert wsd(1000, 1000, **section, floor=0.1) == pytest.approx(0.1)


def test_infinite_cools_down_to_a_constant_rate_and_anneals_exponentially():
    section = {"warmup_tokens": 100, "cooldown_tokens": 400, "anneal_tokens": 200, "constant": 0.4, "floor": 0.1}
    assert [infinite(tokens, 1000, **section) for tokens in (50, 100, 300, 500, 650, 800)] == pytest.approx(
        [0.5, 1, 0.7, 0.4, 0.4, 0.4]
    )
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


TOTAL = 1000
LENGTHS = st.integers(0, 1100)
FACTORS = st.sampled_from([0, 0.0, 0.1, 0.4, 1, 1.0])
WARMUP = st.fixed_dictionaries(
    {}, optional={"warmup_tokens": LENGTHS, "warmup_share": st.just(0) | st.floats(0.001, 1)}
)
OPTIONS = {
    "constant": WARMUP,
    "linear": st.builds(dict.__or__, WARMUP, st.fixed_dictionaries({}, optional={"floor": FACTORS})),
    "cosine": st.builds(dict.__or__, WARMUP, st.fixed_dictionaries({}, optional={"floor": FACTORS})),
    "rewarm_cosine": st.fixed_dictionaries({"warmup_tokens": LENGTHS}, optional={"start": FACTORS, "floor": FACTORS}),
    "wsd": st.builds(
        dict.__or__, WARMUP, st.fixed_dictionaries({"decay_tokens": LENGTHS}, optional={"floor": FACTORS})
    ),
    "infinite": st.fixed_dictionaries(
        {"warmup_tokens": LENGTHS, "cooldown_tokens": LENGTHS, "anneal_tokens": LENGTHS},
        optional={"constant": FACTORS, "floor": FACTORS},
    ),
}
OPTIONS["continued"] = st.one_of(
    st.fixed_dictionaries(
        {"schedule": options.map(lambda options, name=name: {"name": name, **options}), "trained_tokens": LENGTHS},
        optional={"planned_tokens": LENGTHS},
    )
    for name, options in [*OPTIONS.items()]
)


@pytest.mark.parametrize("name", SCHEDULES)
@given(data=st.data())
def test_a_schedule_is_refused_by_its_key_or_never_jumps(name, data):
    options = data.draw(OPTIONS[name])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        build_schedule(Schedule(name=name, **options), optimizer, tokens_per_step=1, total_tokens=TOTAL)
    except RecipeError as problem:
        assert re.match(r"`schedule(\.schedule)?\.\w+`", str(problem))
        return
    inner = options.get("schedule", options)
    planned = options.get("planned_tokens") or options.get("trained_tokens", 0) + TOTAL
    bends = [
        0.0,
        *(inner.get(part, 0) for part in ("warmup_tokens", "cooldown_tokens")),
        inner.get("warmup_share", 0) * planned,
    ]
    bends += [inner.get("warmup_tokens", 0) + inner.get("cooldown_tokens", 0)]
    bends += [planned - inner.get(part, 0) for part in ("decay_tokens", "anneal_tokens")]
    for bend in bends:
        at = bend - options.get("trained_tokens", 0)
        if 0 < at < TOTAL:
            before, after = (SCHEDULES[name](tokens, TOTAL, **options) for tokens in (at - 1e-7, at + 1e-7))
            assert abs(before - after) < 1e-3, (bend, before, after)
    assert all(0 <= SCHEDULES[name](tokens, TOTAL, **options) <= 1 for tokens in range(1, TOTAL + 1, 7))


def test_the_curve_over_tokens_does_not_depend_on_the_batch():
    fine = rates(Schedule(name="cosine", warmup_tokens=200), steps=100, tokens_per_step=10)
    coarse = rates(Schedule(name="cosine", warmup_tokens=200), steps=50, tokens_per_step=20)
    assert coarse == pytest.approx(fine[1::2])


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (Schedule(name="cosin"), "cosin"),
        (Schedule(name="cosine", warmup=3), "`schedule.warmup`"),
        (Schedule(name="cosine", warmup_tokens=10**9), "`schedule.warmup_tokens`"),
        (Schedule(name="cosine", warmup_share=0.1, warmup_tokens=5), "`schedule.warmup_share`"),
        (Schedule(name="wsd", warmup_share=0.9, decay_tokens=10), "`schedule.decay_tokens`"),
        (Schedule(name="wsd"), "`decay_tokens`"),
        (
            Schedule(name="continued", schedule={"name": "wsd", "decay_tokens": 30}, trained_tokens=5),
            "`schedule.schedule.decay_tokens`",
        ),
        (Schedule(name="continued", schedule={"name": "wsd"}, trained_tokens=5), "`schedule.schedule`"),
    ],
)
def test_a_wrong_schedule_is_a_recipe_error(section, key):
    with pytest.raises(RecipeError, match=key):
        rates(section, steps=2, tokens_per_step=10)


@pytest.mark.parametrize("schedule", [constant, linear, cosine, partial(wsd, decay_tokens=200)])
def test_a_share_of_the_run_warms_up_as_its_tokens_do(schedule):
    for tokens in (1, 50, 99, 100, 101, 500, 1000):
        assert schedule(tokens, 1000, warmup_share=0.1) == schedule(tokens, 1000, warmup_tokens=100)
