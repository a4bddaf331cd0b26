import pytest
import torch
from tiny_rewards import bandit, quiet_trainer

from cpt.errors import RecipeError
from cpt.stages.ppo import PPOConfig
from cpt.training.arguments import prompts_of_step


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
    assert prompts_of_step(PPOConfig, {}, 12) == 3
    assert prompts_of_step(PPOConfig, {"num_iterations": 1, "num_generations": 2}, 12) == 6
    with pytest.raises(RecipeError, match="be a multiple of 4"):
        prompts_of_step(PPOConfig, {}, 6)
