import pytest
import torch
from safetensors.torch import load_file
from stages.formulas import generalized_advantages
from tiny_models import make_tokenizer, tiny_config
from tiny_rewards import bandit, quiet_trainer

from cpt.checkpoints.snapshot import saved_parameters
from cpt.contrib.rl.ppo import PPOConfig, ValueHead, clipped_value_loss, estimate_advantages
from cpt.models.build import build_model
from cpt.recipe.schema import Model


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.99, 1.0)])
def test_advantages_are_those_of_the_formula_whatever_the_padding(gamma, lam):
    values = torch.tensor([[0.5, 0.25, -1.0, 2.0], [0.5, 0.75, 9.0, 9.0], [0.1, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).float()
    found = estimate_advantages(torch.tensor([1.0, -2.0, 3.0]), values, mask, gamma=gamma, lam=lam)
    expected = [
        generalized_advantages(1.0, [0.5, 0.25, -1.0, 2.0], gamma, lam),
        [*generalized_advantages(-2.0, [0.5, 0.75], gamma, lam), 0, 0],
    ]
    expected.append([*generalized_advantages(3.0, [0.1], gamma, lam), 0, 0, 0])
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)


def test_a_value_that_moved_far_enough_gains_nothing_by_moving_on():
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    losses = clipped_value_loss(values, torch.zeros(3), torch.ones(3), clip=0.2)
    assert losses.tolist() == pytest.approx([0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2])
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5])


@pytest.mark.parametrize("section", [{}, {"lora": {"r": 4}}], ids=["whole", "adapter"])
def test_values_are_linear_in_the_last_hidden_states_and_their_head_is_not_saved(section, tmp_path):
    model = build_model(
        Model(from_scratch=True, config=tiny_config("llama"), **section), make_tokenizer()
    )
    head = ValueHead.on(model, speed=2.0)
    torch.nn.init.normal_(head.weight)
    ids = torch.arange(3, 11).reshape(2, 4)
    whole = model.get_base_model() if section else model
    with head.listening() as heard:
        model(input_ids=ids)
    hidden = whole.base_model(input_ids=ids).last_hidden_state
    assert (
        torch.allclose(heard[0], 2.0 * (hidden @ head.weight[0] + head.bias), atol=1e-6)
        and len(heard) == 1
    )
    heard[0].sum().backward()
    assert head.weight.grad is not None
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert not [name for name in load_file(file) if "value_head" in name]
    assert all(parameter is not head.weight for parameter, _ in saved_parameters(model))
    assert any(parameter is head.weight for parameter in model.parameters())


def one_generation(folder, count=32, rewards=None, head=False, **training):
    """The trainer, and what it makes of so many prompts."""
    trainer = quiet_trainer(bandit("ppo", folder, steps=1, training=training))
    trainer.model.train()
    if rewards is not None:
        trainer.reward_funcs = [rewards]
    if head:
        torch.nn.init.normal_(trainer.head.weight)
    return trainer, trainer._generate_and_score_completions(
        [trainer.rows[number] for number in range(count)]
    )


@pytest.mark.heavy
def test_the_first_advantages_are_the_rewards(tmp_path):
    trainer, made = one_generation(tmp_path, whiten_advantages=False, lam=1.0)
    assert not made["values"].any() and torch.equal(
        made["advantages"][:, 0], trainer.rewards_of_all
    )
    assert torch.equal(made["returns"], made["advantages"])


@pytest.mark.heavy
def test_whitened_advantages_have_mean_0_and_deviation_1(tmp_path):
    trainer, made = one_generation(
        tmp_path, head=True, max_completion_length=3, least_deviation=0.0
    )
    mean, deviation = trainer.moments(made["advantages"], made["completion_mask"].float())
    assert mean.item() == pytest.approx(0, abs=1e-5) and deviation.item() == pytest.approx(
        1, abs=1e-4
    )
    assert not made["advantages"][made["completion_mask"] == 0].any()


@pytest.mark.heavy
def test_a_row_without_a_reward_changes_nothing(tmp_path):
    rewards = lambda completions, **_: [None, *([1.0] * (len(completions) - 1))]  # noqa: E731
    _, made = one_generation(tmp_path, count=4, rewards=rewards, whiten_advantages=False)
    assert made["advantages"][:, 0].tolist() == [0, 1, 1, 1] and torch.equal(
        made["returns"][0], made["values"][0]
    )


@pytest.mark.parametrize(
    ("given", "completions"),
    [({}, 8), ({"steps_per_generation": 3}, 12), ({"generation_batch_size": 16}, 16)],
)
def test_one_answer_to_a_prompt_is_enough(given, completions):
    config = PPOConfig(
        use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2, **given
    )
    assert config.num_generations == 1 and config.generation_batch_size == completions
