import pytest
import torch
from tiny_rewards import bandit, quiet_trainer

from cpt.stages.spo import SPOConfig


def test_an_advantage_is_the_reward_less_the_value_from_before(tmp_path):
    trainer = quiet_trainer(bandit("spo", tmp_path, steps=1))
    trainer.model.train()
    for number in range(4):
        trainer.tracker.learn([trainer.rows[number]["prompt"]] * 50, [0.25 * number] * 50)
    before = torch.tensor(trainer.tracker.values([trainer.rows[number]["prompt"] for number in range(32)]))
    trainer.prompts = [trainer.rows[number] for number in range(32)]
    made = trainer._generate_and_score_completions(trainer.share_of(trainer.prompts))
    expected = trainer.rewards_of_all - before
    expected = (expected - expected.mean()) / expected.std(correction=0).clamp(min=0.1)
    assert torch.allclose(made["advantages"], expected, atol=1e-5)


@pytest.mark.parametrize("training", [{"rho_min": 0.9, "rho_max": 0.8}, {"half_life": 0.0}])
def test_what_no_tracker_can_do_is_refused(training):
    with pytest.raises(ValueError, match="rho_min|half_life"):
        SPOConfig(use_cpu=True, **training)
