import pytest
import torch
from safetensors.torch import load_file
from tiny_rewards import SHUFFLED, bandit, quiet_trainer, rewards_of

from cpt.errors import RecipeError
from cpt.stages.ppo import CONFIG, PPOConfig, rows_of_step

LARGE = {"per_device_train_batch_size": 64}
COSINE = {"name": "cosine"}


def rewards(tmp_path, **sections):
    trainer = quiet_trainer(
        bandit("ppo", tmp_path, steps=160, learning_rate=3e-3, schedule=COSINE, training=LARGE, **sections)
    )
    trainer.train()
    return trainer, rewards_of(trainer)


SEEDS = [pytest.param(42, marks=pytest.mark.slow), *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 3, 4))]


@pytest.mark.parametrize("seed", SEEDS)
def test_it_learns_a_bandit(seed, tmp_path):
    trainer, found = rewards(tmp_path, seed=seed)
    assert found[0] <= 0.5 and sum(found[-5:]) / 5 > 0.9
    values = [entry["value/mean"] for entry in trainer.state.log_history if "value/mean" in entry]
    assert values[0] == 0 and abs(values[-1] - found[-1]) < 0.2  # by now the head expects what comes


@pytest.mark.long
def test_it_learns_nothing_of_shuffled_rewards(tmp_path):
    assert max(rewards(tmp_path, rewards=SHUFFLED)[1]) <= 0.6


@pytest.mark.long
def test_an_adapter_learns_beside_a_head(tmp_path):
    training = LARGE | {
        "temperature": 0.05,
        "entropy_coef": 0.1,
    }  # the head of the random base only gives small logits
    trainer = quiet_trainer(bandit("ppo", tmp_path, steps=240, schedule=COSINE, training=training, lora=True))
    trainer.train()
    found = rewards_of(trainer)
    assert found[0] <= 0.5 and sum(found[-5:]) / 5 > 0.9
    saved = load_file(tmp_path / "run" / "checkpoint-240" / "adapter_model.safetensors")
    assert not [name for name in saved if "value_head" in name]
    assert (tmp_path / "run" / "checkpoint-240" / "stage_state.pt").exists()


def test_the_first_advantages_are_the_rewards_less_nothing(tmp_path):
    trainer = quiet_trainer(bandit("ppo", tmp_path, steps=1, training={"whiten_advantages": False, "lam": 1.0}))
    trainer.model.train()
    made = trainer._generate_and_score_completions([trainer.rows[number] for number in range(32)])
    assert not made["values"].any()
    assert torch.equal(made["advantages"][:, 0], trainer.rewards_of_all)
    assert torch.equal(made["returns"], made["advantages"])


def test_whitened_advantages_have_mean_0_and_no_smaller_deviation_than_allowed(tmp_path):
    trainer = quiet_trainer(
        bandit("ppo", tmp_path, steps=1, training={"max_completion_length": 3, "least_deviation": 0.0})
    )
    trainer.model.train()
    torch.nn.init.normal_(trainer.head.weight)
    made = trainer._generate_and_score_completions([trainer.rows[number] for number in range(32)])
    mean, deviation = trainer.moments(made["advantages"], made["completion_mask"].float())
    assert mean.item() == pytest.approx(0, abs=1e-5) and deviation.item() == pytest.approx(1, abs=1e-4)
    assert not made["advantages"][made["completion_mask"] == 0].any()


def test_a_row_without_a_reward_moves_nothing(tmp_path):
    trainer = quiet_trainer(bandit("ppo", tmp_path, steps=1, training={"whiten_advantages": False}))
    trainer.model.train()
    trainer.reward_funcs = [lambda completions, **_: [None, *([1.0] * (len(completions) - 1))]]
    made = trainer._generate_and_score_completions([trainer.rows[number] for number in range(4)])
    assert made["advantages"][:, 0].tolist() == [0, 1, 1, 1]
    assert torch.equal(made["returns"][0], made["values"][0])


def test_one_answer_to_a_prompt_is_enough_and_steps_are_counted_in_prompts():
    config = PPOConfig(use_cpu=True, per_device_train_batch_size=6, gradient_accumulation_steps=2)
    assert (config.num_generations, config.generation_batch_size, config.num_iterations) == (1, 12, 4)
    assert PPOConfig(use_cpu=True, per_device_train_batch_size=6, num_generations=3).num_generations == 3
    assert (
        rows_of_step({}, 12) == 3
        and rows_of_step({"num_iterations": 1, "num_generations": 2}, 12) == 6
        and CONFIG is PPOConfig
    )
    with pytest.raises(RecipeError, match="be a multiple of 4"):
        rows_of_step({}, 6)
