"""Muon, SOAP, Shampoo and other libraries' classes: they learn, are saved and loaded exactly, and are refused on slices."""

import copy

import pytest
import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.optim.build import build_optimizer, check_optimizer
from cpt.recipe.schema import Model, Optimizer

RATES = {"muon": 2e-2, "soap": 5e-3, "shampoo": 5e-2, "torch.optim:NAdam": 5e-3, "pytorch_optimizer:Lion": 1e-3}


def model():
    return build_model(Model(from_scratch=True, config=tiny_config("llama")), make_tokenizer())


def steps(trained, optimizer, count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, trained.config.vocab_size, (4, 16), generator=generator)
    losses = []
    for _ in range(count):
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", RATES)
def test_it_learns_and_goes_on_from_its_saved_state_bit_for_bit(name):
    if "pytorch_optimizer" in name or name in ("soap", "shampoo"):
        pytest.importorskip("pytorch_optimizer")
    trained = model()
    optimizer = build_optimizer(Optimizer(name=name, learning_rate=RATES[name]), trained)
    losses = steps(trained, optimizer, 12)
    assert losses[-1] < 0.9 * losses[0]
    weights, state = copy.deepcopy(trained.state_dict()), copy.deepcopy(optimizer.state_dict())
    straight = steps(trained, optimizer, 4)
    again = model()
    again.load_state_dict(weights)
    resumed = build_optimizer(Optimizer(name=name, learning_rate=RATES[name]), again)
    resumed.load_state_dict(state)
    assert steps(again, resumed, 4) == straight


def test_muon_makes_matrices_orthogonal_and_leaves_the_rest_to_adamw():
    trained = model()
    optimizer = build_optimizer(Optimizer(name="muon", learning_rate=1e-3, weight_decay=0.0), trained)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    steps(trained, optimizer, 1)
    update = before["model.layers.0.mlp.up_proj.weight"] - trained.state_dict()["model.layers.0.mlp.up_proj.weight"]
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.3 * values.max()  # Newton-Schulz leaves them between 0.7 and 1.2
    of_adamw = (before["lm_head.weight"] - trained.state_dict()["lm_head.weight"]).abs()
    assert of_adamw.max() == pytest.approx(1e-3, rel=0.05)  # AdamW's first step is the rate, for each number


def test_a_schedule_moves_both_parts_of_muon():
    trained = model()
    optimizer = build_optimizer(Optimizer(name="muon", learning_rate=1e-3), trained)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = copy.deepcopy(trained.state_dict())
    steps(trained, optimizer, 2)
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in before.items())
    assert schedule.get_last_lr() == [0.0] * len(optimizer.param_groups)


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo"])
def test_what_needs_whole_matrices_is_refused_under_zero(name):
    with pytest.raises(RecipeError, match="needs whole matrices"):
        build_optimizer(Optimizer(name=name, learning_rate=1e-3), model(), partitioned=True)


def test_options_of_a_class_are_its_own_arguments():
    built = build_optimizer(Optimizer(name="torch.optim:NAdam", learning_rate=1e-3, betas=[0.8, 0.9]), model())
    assert built.defaults["betas"] == (0.8, 0.9) and built.defaults["lr"] == 1e-3
    with pytest.raises(RecipeError, match="momentum_decoy.*Did you mean `momentum_decay`"):
        check_optimizer(Optimizer(name="torch.optim:NAdam", momentum_decoy=0.1))


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_a_decay_of_rates_is_a_share(decay):
    with pytest.raises(RecipeError, match="layer_decay"):
        check_optimizer(Optimizer(layer_decay=decay))
