import pytest
import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.models.build import build_model
from cpt.models.families.minimind_moe import balance_loss
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


def build(model_type: str):
    return build_model(Model(from_scratch=True, config=tiny_config(model_type)), make_tokenizer(), seed=3)


def test_even_use_of_the_experts_costs_one_a_layer():
    even = torch.eye(4).repeat(3, 1) * 1e-4  # 12 tokens, each expert chosen equally often
    assert balance_loss((even, even), top_k=1, num_sequences=1).item() == pytest.approx(2, abs=1e-3)


def test_one_expert_for_all_costs_as_much_as_there_are_experts():
    one = torch.tensor([[30.0, 0, 0, 0]]).repeat(12, 1)
    assert balance_loss((one,), top_k=1, num_sequences=1).item() == pytest.approx(4)


def test_counting_within_sequences_sees_what_the_batch_evens_out():
    first, second = torch.tensor([[9.0, 0]]).repeat(6, 1), torch.tensor([[0, 9.0]]).repeat(6, 1)
    both = (torch.cat([first, second]),)
    assert balance_loss(both, top_k=1, num_sequences=1).item() == pytest.approx(1)
    assert balance_loss(both, top_k=1, num_sequences=2).item() == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("model_type", ["minimind2_moe", "minimind3_moe"])
def test_the_balance_is_part_of_the_training_loss_only(model_type: str):
    model = build(model_type)
    evaluated, trained = model.eval()(IDS, labels=IDS), model.train()(IDS, labels=IDS)
    assert evaluated.aux_loss is None
    expected = evaluated.loss + model.config.router_aux_loss_coef * trained.aux_loss
    torch.testing.assert_close(trained.loss, expected)
    trained.aux_loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


def test_minimind2_adds_every_shared_expert_to_the_routed_ones():
    block = build("minimind2_moe").model.layers[0].mlp.eval()
    hidden = torch.randn(1, 5, 32)
    flat = hidden.view(-1, 32)
    scores, chosen = (flat @ block.gate.weight.T).softmax(-1).topk(2)
    weights = scores / scores.sum(-1, keepdim=True)
    expected = block.shared_experts[0](flat).clone()
    for token in range(5):
        for weight, expert in zip(weights[token], chosen[token], strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ flat[token]).chunk(2)
            expected[token] += weight * (block.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(block(hidden).view(-1, 32), expected)
