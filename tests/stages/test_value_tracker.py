import math

import pytest

from cpt.stages.spo import NOTHING_KNOWN, ValueTracker, key_of


def tracker(**options):
    return ValueTracker(**{"half_life": 0.1, "rho_min": 0.5, "rho_max": 0.9} | options)


def test_the_rule_is_that_of_a_beta_distribution_that_forgets():
    tracked = tracker()
    alpha, beta = 0.5 * NOTHING_KNOWN / 0.25 * 1.0, 1.0  # 1 / (1 - rho_min) = 2 answers, half of them right
    for drift, reward in ((0.0, 1.0), (0.05, 0.0), (0.3, 1.0), (0.31, 1.0)):
        before = tracked.prompts[key_of("a")].seen_at if tracked.prompts else drift
        tracked.drift = drift
        rho = min(max(2 ** (-(drift - before) / 0.1), 0.5), 0.9)
        alpha, beta = rho * alpha + reward, rho * beta + 1 - reward
        assert tracked.learn(["a"], [reward]) == pytest.approx(rho)
        assert tracked.values(["a"]) == pytest.approx([alpha / (alpha + beta)])
        assert tracked.prompts[key_of("a")].count == pytest.approx(alpha + beta)


def test_a_new_prompt_begins_at_the_mean_of_the_others():
    tracked = tracker()
    assert tracked.values(["a"]) == [NOTHING_KNOWN]
    tracked.learn(["a"] * 200, [1.0] * 200)
    assert tracked.values(["b"]) == tracked.values(["a"]) == pytest.approx([1.0], abs=1e-6)


def test_answers_to_which_no_reward_applies_teach_nothing():
    tracked = tracker()
    assert tracked.learn(["a"], [math.nan]) == 1.0
    assert not tracked.prompts


def test_rewards_of_any_size_are_tracked():
    tracked = tracker()
    tracked.learn(["a"] * 50 + ["b"] * 50, [-7.0] * 50 + [12.0] * 50)
    assert tracked.values(["a", "b"]) == pytest.approx([-7.0, 12.0], abs=0.2)


def test_a_tracker_goes_on_from_its_state():
    first, second = tracker(), tracker()
    first.learn(["a", "b", [{"role": "user", "content": "c"}]], [1.0, 0.0, 0.25])
    first.drift = 0.123
    second.restore(first.state())
    assert second.prompts == first.prompts and second.drift == first.drift
    assert tracker().state()["prompts"].shape == (0,)


def test_a_prompt_is_known_by_its_words():
    assert key_of([{"role": "user", "content": "c"}]) == key_of([{"content": "c", "role": "user"}]) != key_of("c")
