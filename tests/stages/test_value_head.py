import pytest
import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.models.build import build_model
from cpt.recipe.schema import Model
from cpt.stages.ppo import ValueHead, clipped_value_loss, estimate_advantages


def by_hand(reward, values, gamma, lam):
    """Equation 16 of arXiv 1506.02438, written out: sums of discounted errors of one completion without padding."""
    deltas = [
        (reward if t == len(values) - 1 else 0) + gamma * (values[t + 1] if t + 1 < len(values) else 0) - v
        for t, v in enumerate(values)
    ]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(values)))
        for t in range(len(values))
    ]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.99, 1.0)])
def test_advantages_are_those_of_the_formula_whatever_the_padding(gamma, lam):
    values = torch.tensor([[0.5, 0.25, -1.0, 2.0], [0.5, 0.75, 9.0, 9.0], [0.1, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).float()
    found = estimate_advantages(torch.tensor([1.0, -2.0, 3.0]), values, mask, gamma=gamma, lam=lam)
    expected = [by_hand(1.0, [0.5, 0.25, -1.0, 2.0], gamma, lam), [*by_hand(-2.0, [0.5, 0.75], gamma, lam), 0, 0]]
    expected.append([*by_hand(3.0, [0.1], gamma, lam), 0, 0, 0])
    assert torch.allclose(found, torch.tensor(expected), atol=1e-6)


def test_a_value_that_moved_far_enough_gains_nothing_by_moving_on():
    values = torch.tensor([0.1, 0.5, -0.5], requires_grad=True)
    losses = clipped_value_loss(values, torch.zeros(3), torch.ones(3), clip=0.2)
    assert losses.tolist() == pytest.approx([0.5 * 0.9**2, 0.5 * 0.8**2, 0.5 * 1.5**2])
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-0.9, 0.0, -1.5])


def model_with_head(**section):
    model = build_model(Model(from_scratch=True, config=tiny_config("llama"), **section), make_tokenizer())
    return model, ValueHead.on(model, speed=2.0)


@pytest.mark.parametrize("section", [{}, {"lora": {"r": 4}}], ids=["whole", "adapter"])
def test_values_are_a_linear_function_of_the_last_hidden_states(section):
    model, head = model_with_head(**section)
    torch.nn.init.normal_(head.weight)
    ids = torch.arange(3, 11).reshape(2, 4)
    whole = model.get_base_model() if section else model
    with head.listening() as heard:
        model(input_ids=ids)
    hidden = whole.base_model(input_ids=ids).last_hidden_state
    assert torch.allclose(heard[0], 2.0 * (hidden @ head.weight[0] + head.bias), atol=1e-6)
    model(input_ids=ids)
    assert len(heard) == 1
    heard[0].sum().backward()
    assert head.weight.grad is not None


@pytest.mark.parametrize("section", [{}, {"lora": {"r": 4}}], ids=["whole", "adapter"])
def test_a_saved_model_has_no_head(section, tmp_path):
    from safetensors.torch import load_file

    from cpt.checkpoints.snapshot import saved_parameters

    model, head = model_with_head(**section)
    model.save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    assert not [name for name in load_file(file) if "value_head" in name]
    assert all(parameter is not head.weight for parameter, _ in saved_parameters(model))
    assert any(parameter is head.weight for parameter in model.parameters())
