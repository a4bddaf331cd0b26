import math

import pytest
import torch
from tiny_rewards import bandit, quiet_trainer

from cpt.contrib.rl.spo import NOTHING_KNOWN, SPOConfig, ValueTracker, key_of


@pytest.fixture
def tracker():
    return ValueTracker(half_life=0.1, rho_min=0.5, rho_max=0.9)


def test_the_rule_is_that_of_a_beta_distribution_that_forgets(tracker):
    alpha, beta = (
        0.5 * NOTHING_KNOWN / 0.25 * 1.0,
        1.0,
    )  # 1 / (1 - rho_min) = 2 answers, half of them right
    for drift, reward in ((0.0, 1.0), (0.05, 0.0), (0.3, 1.0), (0.31, 1.0)):
        before = tracker.prompts[key_of("a")].seen_at if tracker.prompts else drift
        tracker.drift = drift
        rho = min(max(2 ** (-(drift - before) / 0.1), 0.5), 0.9)
        alpha, beta = rho * alpha + reward, rho * beta + 1 - reward
        assert tracker.learn(["a"], [reward]) == pytest.approx(rho)
        assert tracker.values(["a"]) == pytest.approx([alpha / (alpha + beta)])
        assert tracker.prompts[key_of("a")].count == pytest.approx(alpha + beta)


def test_a_new_prompt_begins_at_the_mean_of_the_others(tracker):
    assert tracker.values(["a"]) == [NOTHING_KNOWN]
    tracker.learn(["a"] * 200, [1.0] * 200)
    assert tracker.values(["b"]) == tracker.values(["a"]) == pytest.approx([1.0], abs=1e-6)


def test_answers_to_which_no_reward_applies_teach_nothing(tracker):
    assert tracker.learn(["a"], [math.nan]) == 1.0 and not tracker.prompts


def test_rewards_of_any_size_are_tracked(tracker):
    tracker.learn(["a"] * 50 + ["b"] * 50, [-7.0] * 50 + [12.0] * 50)
    assert tracker.values(["a", "b"]) == pytest.approx([-7.0, 12.0], abs=0.2)


def test_a_tracker_is_restored_from_its_state(tracker):
    tracker.learn(["a", "b", [{"role": "user", "content": "c"}]], [1.0, 0.0, 0.25])
    tracker.drift = 0.123
    other = ValueTracker(half_life=0.1, rho_min=0.5, rho_max=0.9)
    other.restore(tracker.state())
    assert other.prompts == tracker.prompts and other.drift == tracker.drift


def test_a_prompt_is_known_by_its_words():
    assert (
        key_of([{"role": "user", "content": "c"}])
        == key_of([{"content": "c", "role": "user"}])
        != key_of("c")
    )


@pytest.mark.heavy
def test_an_advantage_is_the_reward_less_the_value_from_before(tmp_path):
    trainer = quiet_trainer(bandit("spo", tmp_path, steps=1))
    trainer.model.train()
    rows = [trainer.rows[number] for number in range(32)]
    for number in range(4):
        trainer.tracker.learn([rows[number]["prompt"]] * 50, [0.25 * number] * 50)
    before = torch.tensor(trainer.tracker.values([row["prompt"] for row in rows]))
    trainer.prompts = rows
    made = trainer._generate_and_score_completions(trainer.share_of(rows))
    expected = trainer.rewards_of_all - before
    expected = (expected - expected.mean()) / expected.std(correction=0).clamp(min=0.1)
    assert torch.allclose(made["advantages"], expected, atol=1e-5)


@pytest.mark.parametrize("training", [{"rho_min": 0.9, "rho_max": 0.8}, {"half_life": 0.0}])
def test_impossible_options_of_a_tracker_are_refused(training):
    with pytest.raises(ValueError, match=r"rho_min|half_life"):
        SPOConfig(use_cpu=True, **training)
