import pytest
import torch
from tiny_rewards import bandit, quiet_trainer

from cpt.errors import RecipeError
from cpt.stages.spo import SPOConfig, rows_of_step


def test_an_advantage_is_the_reward_less_the_value_from_before(tmp_path):
    trainer = quiet_trainer(bandit("spo", tmp_path, steps=1))
    trainer.model.train()
    for number in range(4):
        trainer.tracker.learn([trainer.rows[number]["prompt"]] * 50, [0.25 * number] * 50)
    before = torch.tensor(trainer.tracker.values([trainer.rows[number]["prompt"] for number in range(32)]))
    made = trainer._generate_and_score_completions(
        trainer.share_of(trainer.choose([trainer.rows[number] for number in range(32)]))
    )
    expected = trainer.rewards_of_all - before
    expected = (expected - expected.mean()) / expected.std(correction=0).clamp(min=0.1)
    assert torch.allclose(made["advantages"], expected, atol=1e-5)


def test_prompts_are_drawn_from_the_next_ones(tmp_path):
    trainer = quiet_trainer(bandit("spo", tmp_path, steps=3, training={"prompts_read": 4}))
    read, answered = [], []
    choose = trainer.choose

    def noted(prompts):
        chosen = choose(prompts)
        read.append([row["number"] for row in prompts])
        answered.append([row["number"] for row in chosen])
        return chosen

    trainer.choose = noted
    trainer.train()
    assert read == [list(range(128 * step, 128 * (step + 1))) for step in range(3)]
    assert all(
        len(set(some)) == 32 and set(some) <= set(all_read) for some, all_read in zip(answered, read, strict=True)
    )
    assert trainer.rows_of_steps.rows_per_step == 128 == rows_of_step({"prompts_read": 4}, 32)


@pytest.mark.parametrize("training", [{"rho_min": 0.9, "rho_max": 0.8}, {"prompts_read": 0}, {"half_life": 0.0}])
def test_what_no_tracker_can_do_is_refused(training, tmp_path):
    with pytest.raises((RecipeError, ValueError), match="rho_min|prompts_read"):
        SPOConfig(use_cpu=True, **training)


def test_a_priority_without_a_choice_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="least_priority` would have no effect"):
        quiet_trainer(bandit("spo", tmp_path, steps=1, training={"least_priority": 0.1}))
