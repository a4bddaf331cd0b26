import pytest
import torch
from tiny_rewards import bandit, quiet_trainer

from cpt.stages.ppo import PPOConfig


@pytest.fixture
def trainer(tmp_path):
    built = quiet_trainer(bandit("spo", tmp_path, steps=1))
    built.model.train()
    return built


def test_rewards_of_a_generation_are_weighted_sums_and_none_is_nan(trainer):
    trainer.reward_funcs = [lambda completions, **_: [1.0, None, None], lambda completions, **_: [2.0, 4.0, None]]
    trainer.reward_func_names, trainer.reward_processing_classes = ["a", "b"], [None, None]
    trainer.reward_weights = torch.tensor([1.0, 0.5])
    trainer._calculate_rewards([{"prompt": "?"}] * 3, ["?"] * 3, ["!"] * 3, [[1]] * 3)
    assert trainer.rewards_of_all[:2].tolist() == [2.0, 2.0] and trainer.rewards_of_all[2].isnan()
    assert torch.equal(trainer.part_of_process(trainer.rewards_of_all)[:2], trainer.rewards_of_all[:2])


def test_log_probabilities_are_those_of_the_model(trainer):
    rows = [trainer.rows[number] for number in range(4)]
    trainer.prompts = rows
    made = trainer._generate_and_score_completions(trainer.share_of(rows))
    ids = torch.cat((made["prompt_ids"], made["completion_ids"]), dim=1)
    logits = trainer.model(input_ids=ids).logits[:, made["prompt_ids"].size(1) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, made["completion_ids"][..., None])[..., 0]
    assert torch.allclose(trainer.log_probabilities(made), expected, atol=1e-5)
    assert not trainer.log_probabilities(made).requires_grad


@pytest.mark.parametrize(
    ("given", "completions"),
    [({}, 8), ({"steps_per_generation": 3}, 12), ({"generation_batch_size": 16}, 16)],
)
def test_a_whole_generation_stands_for_a_group(given, completions):
    config = PPOConfig(use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, **given)
    assert config.num_generations == 1 and config.generation_batch_size == completions
