import pytest
from tiny_rewards import bandit, quiet_trainer


def test_rewards_are_weighted_and_logged_by_their_names(tmp_path):
    both = [{"name": "exact_match", "weight": 2.0}, {"name": "length", "at_least": 1, "weight": 0.5}]
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=3, rewards=both))
    trainer.train()
    for entry in trainer.state.log_history[:3]:
        assert entry["reward"] == pytest.approx(
            2 * entry["rewards/exact_match/mean"] + 0.5 * entry["rewards/length/mean"]
        )
        assert entry["rewards/length/mean"] == 1


def test_an_adaptive_entropy_bonus_goes_on_where_it_stood(tmp_path):
    training = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0}
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=3, training=training))
    trainer.train()
    again = quiet_trainer(bandit("grpo", tmp_path / "again", steps=3, training=training))
    again.restore_own(trainer.own_state())
    assert (again.entropy_coef, again._last_world_entropy) == (trainer.entropy_coef, trainer._last_world_entropy)
    assert again.entropy_coef > 0.01
