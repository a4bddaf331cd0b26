import inspect
import math
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt.errors import RecipeError
from cpt.optim.schedules import (
    SCHEDULES,
    build_schedule,
    constant,
    continued,
    cosine,
    infinite,
    linear,
    phases_in_tokens,
    rewarm_cosine,
    wsd,
)
from cpt.recipe.schema import Budget, Data, Model, Phase, Recipe, Schedule, Source


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


WARM = {"warmup_tokens": 100}
INFINITE = {"cooldown_tokens": 400, "anneal_tokens": 200, "constant": 0.4, "floor": 0.1}


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        (cosine, {"floor": 0.2}, {50: 0.5, 100: 1.0, 550: 0.6, 1000: 0.2}),
        (linear, {"floor": 0.2}, {50: 0.5, 100: 1.0, 550: 0.6, 1000: 0.2}),
        (
            rewarm_cosine,
            {"start": 0.2, "floor": 0.1},
            {0: 0.2, 50: 0.6, 100: 1.0, 550: 0.55, 1000: 0.1},
        ),
        (
            wsd,
            {"decay_tokens": 200},
            {50: 0.5, 100: 1, 800: 1, 850: 0.5, 900: 1 - math.sqrt(0.5), 1000: 0},
        ),
        (wsd, {"decay_tokens": 200, "floor": 0.1}, {850: 0.55, 1000: 0.1, 1100: 0.1}),
        (cosine, {}, {325: 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5)), 1000: 0.1, 1100: 0.1}),
        (linear, {}, {325: 0.75, 1000: 0, 1100: 0}),
        (rewarm_cosine, {}, {0: 0, 50: 0.5, 100: 1, 1000: 0.1}),
        (constant, {}, {50: 0.5, 100: 1, 1000: 1}),
        (
            infinite,
            {"cooldown_tokens": 400, "anneal_tokens": 200},
            {500: 0.5, 800: 0.5, 900: math.sqrt(0.05), 1000: 0.1, 1100: 0.1},
        ),
        (infinite, {"cooldown_tokens": 400, "anneal_tokens": 0}, {300: 0.75, 1000: 0.5}),
        (
            infinite,
            INFINITE,
            {50: 0.5, 100: 1, 300: 0.7, 500: 0.4, 650: 0.4, 800: 0.4, 900: 0.2, 1000: 0.1},
        ),
    ],
)
def test_a_schedule_has_the_factors_that_are_calculated_by_hand(schedule, options, expected):
    found = {tokens: schedule(tokens, 1000, **WARM, **options) for tokens in expected}
    assert found == pytest.approx(expected)


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


def test_a_schedule_continues_a_cosine_to_the_end_that_was_planned_or_to_its_own():
    options = {"schedule": {}, "trained_tokens": 400}
    assert continued(100, 500, **options) == cosine(500, 900)
    assert continued(100, 500, **options, planned_tokens=2000) == cosine(500, 2000)
    inner = {"name": "linear", "floor": 0.3}
    assert continued(100, 500, schedule=inner, trained_tokens=400) == linear(500, 900, floor=0.3)


TOTAL = 1000
FACTORS = st.sampled_from([0, 0.0, 0.1, 0.4, 1, 1.0])


@st.composite
def some_options(draw, name):
    """Any that the schedule takes, and all that it needs."""
    if name == "continued":
        inner = draw(st.sampled_from([other for other in SCHEDULES if other != name]))
        options = {"schedule": {"name": inner, **draw(some_options(inner))}}
    else:
        options = {}
    for option, parameter in list(inspect.signature(SCHEDULES[name]).parameters.items())[2:]:
        is_needed = parameter.default is parameter.empty
        if option in options or not (is_needed or draw(st.booleans())):
            continue
        share = st.just(0) | st.floats(0.001, 1) if option == "warmup_share" else FACTORS
        options[option] = draw(st.integers(0, 1100) if option.endswith("_tokens") else share)
    return options


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=40)
@given(data=st.data())
def test_a_schedule_is_refused_by_its_key_or_never_jumps(name, data):
    options = data.draw(some_options(name))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    try:
        build_schedule(
            Schedule(name=name, **options), optimizer, tokens_per_step=1, total_tokens=TOTAL
        )
    except RecipeError as problem:
        assert re.match(r"`schedule(\.schedule)?\.\w+`", str(problem))
        return
    inner = options.get("schedule", options)
    planned = options.get("planned_tokens") or options.get("trained_tokens", 0) + TOTAL
    warmup, cooldown = inner.get("warmup_tokens", 0), inner.get("cooldown_tokens", 0)
    bends = [0.0, warmup, cooldown, warmup + cooldown, inner.get("warmup_share", 0) * planned]
    bends += [planned - inner.get(part, 0) for part in ("decay_tokens", "anneal_tokens")]
    for bend in bends:
        at = bend - options.get("trained_tokens", 0)
        if 0 < at < TOTAL:
            before, after = (
                SCHEDULES[name](tokens, TOTAL, **options) for tokens in (at - 1e-7, at + 1e-7)
            )
            assert abs(before - after) < 1e-3, (bend, before, after)
    assert all(
        0 <= SCHEDULES[name](tokens, TOTAL, **options) <= 1 for tokens in range(1, TOTAL + 1, 7)
    )


def test_the_curve_over_tokens_does_not_depend_on_the_batch():
    section = Schedule(name="cosine", warmup_tokens=200)
    fine, coarse = (
        rates(section, steps=steps, tokens_per_step=1000 // steps) for steps in (100, 50)
    )
    assert coarse == pytest.approx(fine[1::2])


WSD = {"name": "wsd", "decay_tokens": 30}


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
            Schedule(name="continued", schedule=WSD, trained_tokens=5),
            r"`schedule\.schedule\.decay_tokens`",
        ),
        (
            Schedule(name="continued", schedule={"name": "wsd"}, trained_tokens=5),
            r"`schedule\.schedule`",
        ),
    ],
)
def test_a_wrong_schedule_is_a_recipe_error(section, key):
    with pytest.raises(RecipeError, match=key):
        rates(section, steps=2, tokens_per_step=10)


def test_parts_may_fill_the_schedule_and_not_be_longer():
    section = Schedule(name="wsd", warmup_tokens=800, decay_tokens=1200)
    rates(section, steps=2, tokens_per_step=1000)
    with pytest.raises(RecipeError) as refused:
        rates(section, steps=1999, tokens_per_step=1)
    assert str(refused.value) == (
        "`schedule.warmup_tokens` is 800 tokens and `schedule.decay_tokens` is 1,200 tokens, but the whole schedule"
        " has 1,999. Lower them."
    )
    shared = Schedule(name="wsd", warmup_share=0.4, decay_tokens=1200)
    rates(shared, steps=2, tokens_per_step=1000)
    with pytest.raises(RecipeError, match="`schedule.warmup_share` is 1,200 tokens, but"):
        rates(shared.model_copy(update={"decay_tokens": 1801}), steps=3, tokens_per_step=1000)
    inner = {"name": "wsd", "decay_tokens": 1500}
    rest = {"name": "continued", "schedule": inner, "trained_tokens": 500}
    rates(Schedule(**rest), steps=1, tokens_per_step=1000)
    rates(Schedule(**rest, planned_tokens=1600), steps=1, tokens_per_step=10)
    with pytest.raises(RecipeError, match="`schedule.schedule.decay_tokens` is 1,500 tokens"):
        rates(Schedule(**rest, planned_tokens=1400), steps=1, tokens_per_step=1000)


@pytest.mark.parametrize("schedule", [constant, linear, cosine, partial(wsd, decay_tokens=200)])
def test_a_share_of_the_run_warms_up_as_its_tokens_do(schedule):
    for tokens in (1, 50, 99, 100, 101, 500, 1000):
        assert schedule(tokens, 1000, warmup_share=0.1) == schedule(tokens, 1000, warmup_tokens=100)


# --- phases that end at a learning rate ------------------------------------------------------------------------------


def run_with(*phases: Phase, tokens: int = 100_000, **schedule) -> Recipe:
    return Recipe(
        name="r",
        model=Model(path="a/b"),
        data=Data(
            sources=[Source(path="a/code"), Source(path="a/prose")],
            sequence_length=10,
            phases=list(phases),
        ),
        budget=Budget(tokens=tokens),
        schedule=Schedule(**schedule),
    )


def ends(*phases: Phase, **options) -> list[int | None]:
    return [phase.until for phase in phases_in_tokens(run_with(*phases, **options)).phases]


CODE, LAST = {"code": 1.0}, Phase(weights={"prose": 1.0})


@pytest.mark.parametrize(
    "section",
    [
        {"name": "linear", "warmup_tokens": 30_000},
        {"name": "cosine", "warmup_tokens": 1000},
        {"name": "rewarm_cosine", "warmup_tokens": 1000, "start": 0.9, "floor": 0.05},
        {"name": "wsd", "decay_tokens": 20_000},
        {
            "name": "infinite",
            "warmup_tokens": 1000,
            "cooldown_tokens": 40_000,
            "anneal_tokens": 10_000,
        },
        {
            "name": "continued",
            "schedule": {"name": "wsd", "decay_tokens": 9000},
            "trained_tokens": 50,
        },
    ],
)
def test_a_phase_ends_at_the_first_token_from_which_on_the_rate_is_below_the_share(section):
    schedule, share = Schedule(**section), 0.3
    found, last = ends(Phase(until_learning_rate=share, weights=CODE), LAST, **section)
    factors = [
        SCHEDULES[schedule.name](tokens, 100_000, **schedule.options)
        for tokens in range(found - 1, 100_001)
    ]
    assert factors[0] > share >= max(factors[1:]) and last is None


def test_phases_may_end_at_tokens_and_at_learning_rates_in_turn():
    first, last = Phase(until=1000, weights=CODE), Phase(until=60_000, weights=CODE)
    middle = Phase(until_learning_rate=0.5, weights=CODE)
    assert ends(first, middle, last, LAST, name="linear") == [1000, 50_000, 60_000, None]


@pytest.mark.parametrize(
    ("share", "section"),
    [
        (0.2, {"name": "constant", "warmup_tokens": 9000}),
        (0.05, {"name": "cosine"}),
        (0.6, {"name": "continued", "schedule": {"name": "linear"}, "trained_tokens": 100_000}),
    ],
)
def test_a_learning_rate_that_the_decay_does_not_come_to_is_refused(share, section):
    with pytest.raises(RecipeError, match=r"`data\.phases\[0\]\.until_learning_rate`"):
        ends(Phase(until_learning_rate=share, weights=CODE), LAST, **section)


@pytest.mark.parametrize(
    "phases",
    [
        [{"until": 70_000}, {"until_learning_rate": 0.5}],
        [{"until_learning_rate": 0.5}, {"until": 40_000}],
    ],
)
def test_a_phase_that_ends_before_it_starts_is_refused(phases):
    with pytest.raises(RecipeError, match=r"`data\.phases\[1\]\.until(_learning_rate)?`"):
        ends(*(Phase(**ending, weights=CODE) for ending in phases), LAST, name="linear")
