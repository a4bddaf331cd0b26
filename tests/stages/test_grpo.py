import pytest
import trl
from tiny_rewards import SHUFFLED, bandit, quiet_trainer, rewards_of

from cpt.stages import grpo

LARGE = {"per_device_train_batch_size": 64, "entropy_coef": 0.02}
COSINE = {"name": "cosine"}


def rewards(tmp_path, **sections):
    trainer = quiet_trainer(
        bandit("grpo", tmp_path, steps=70, learning_rate=6e-3, schedule=COSINE, training=LARGE, **sections)
    )
    trainer.train()
    return rewards_of(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [42, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 3, 4))])
def test_it_learns_a_bandit(seed, tmp_path):
    found = rewards(tmp_path, seed=seed)
    assert found[0] <= 0.5 and sum(found[-5:]) / 5 > 0.9


@pytest.mark.long
def test_it_learns_nothing_of_shuffled_rewards(tmp_path):
    assert max(rewards(tmp_path, rewards=SHUFFLED)) <= 0.6


@pytest.mark.long
def test_an_adapter_learns(tmp_path):
    training = LARGE | {
        "temperature": 0.05,
        "entropy_coef": 0.1,
    }  # the head of the random base only gives small logits
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=160, schedule=COSINE, training=training, lora=True))
    trainer.train()
    found = rewards_of(trainer)
    assert found[0] <= 0.5 and sum(found[-5:]) / 5 > 0.9


def test_rewards_are_weighted_and_logged_by_their_names(tmp_path):
    both = [{"name": "exact_match", "weight": 2.0}, {"name": "length", "at_least": 1, "weight": 0.5}]
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=3, rewards=both))
    trainer.train()
    for entry in trainer.state.log_history[:3]:
        assert entry["reward"] == pytest.approx(
            2 * entry["rewards/exact_match/mean"] + 0.5 * entry["rewards/length/mean"]
        )
        assert entry["rewards/length/mean"] == 1


def test_it_is_trls_trainer_on_prompts():
    assert grpo.CONFIG is trl.GRPOConfig and grpo.COLUMNS == ("prompt",)
    assert grpo.rows_of_step({"num_generations": 4}, 32) == 8


def test_an_adaptive_entropy_bonus_goes_on_where_it_stood(tmp_path):
    training = {"use_adaptive_entropy": True, "entropy_coef": 0.01, "entropy_target": 9.0}
    trainer = quiet_trainer(bandit("grpo", tmp_path, steps=3, training=training))
    trainer.train()
    again = quiet_trainer(bandit("grpo", tmp_path / "again", steps=3, training=training))
    again.restore_own(trainer.own_state())
    assert (again.entropy_coef, again._last_world_entropy) == (trainer.entropy_coef, trainer._last_world_entropy)
    assert again.entropy_coef > 0.01
