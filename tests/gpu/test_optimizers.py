"""What only a CUDA GPU can show of optimizers in little memory: pages, peaks, and that nobody waits."""

import copy

import pytest
import torch
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.optim import adamw
from cpt.optim.adamw_update import BLOCK, adamw_update
from cpt.optim.build import build_optimizer
from cpt.optim.gradients import ReleasedGradients
from cpt.recipe.schema import Optimizer

pytestmark = pytest.mark.gpu
SHAPE = {
    **TINY_LLAMA,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "max_position_embeddings": 256,
}


def built():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SHAPE), dtype=torch.bfloat16
    ).cuda()


def course(section, *, count=4):
    """Losses, the model and its optimizer."""
    model = built()
    optimizer = build_optimizer(section, model)
    ids = torch.randint(4, 300, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer


def states_after_updates(device, weights, *, eight_bit, rounding, skips):
    """Weights and states after three updates, of which the second may be skipped."""
    size, moments = len(weights), ("exp_avg", "exp_avg_sq")
    tensors = {
        name: torch.zeros(size, dtype=torch.uint8 if eight_bit else torch.float32)
        for name in moments
    }
    tensors |= {
        f"{name}_scale": torch.zeros(-(-size // BLOCK)) if eight_bit else None for name in moments
    }
    tensors["companion"] = {"master": weights.float(), "kahan": torch.zeros_like(weights)}.get(
        rounding
    )
    tensors["weights"] = weights
    tensors = {
        name: None if of is None else of.to(device, copy=True) for name, of in tensors.items()
    }
    options = {
        "learning_rate": 1e-3,
        "decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "before": 512,
        "seed": 3,
    }
    for step in range(1, 4):
        numbers = {"step": float(step), "grad_scale": 4.0, "found_inf": float(skips and step == 2)}
        each = {name: torch.tensor(value, device=device) for name, value in numbers.items()}
        gradients = (
            torch.randn(size, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
        )
        adamw_update(**tensors, gradients=gradients, rounding=rounding, **each, **options)
    return {name: of.cpu() for name, of in tensors.items() if of is not None}


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("rounding", ["master", "kahan", "stochastic"])
@pytest.mark.parametrize("eight_bit", [False, True])
def test_the_kernel_has_the_numbers_of_a_cpu(eight_bit, rounding, skips):
    weights = torch.randn(100 * BLOCK + 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, found = (
        states_after_updates(device, weights, eight_bit=eight_bit, rounding=rounding, skips=skips)
        for device in ("cpu", "cuda")
    )
    for name, tensor in expected.items():
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-7)
        else:
            assert (found[name] != tensor).float().mean() < 0.01


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_pages_change_nothing_and_leave_the_gpu(monkeypatch, rounding):
    monkeypatch.setattr(adamw, "BUFFER", 2**20)  # several pieces a matrix
    here = course(Optimizer(name="adamw_8bit", learning_rate=1e-3, rounding=rounding))
    paged = course(Optimizer(name="paged_adamw_8bit", learning_rate=1e-3, rounding=rounding))
    assert paged[0] == here[0]
    assert all(
        torch.equal(one, other)
        for one, other in zip(here[1].parameters(), paged[1].parameters(), strict=True)
    )
    state = paged[2].state[paged[1].model.layers[0].mlp.up_proj.weight]
    large = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    assert all(value.device.type == "cpu" and value.is_pinned() for value in large.values())
    again = build_optimizer(
        Optimizer(name="paged_adamw_8bit", learning_rate=1e-3, rounding=rounding), model := built()
    )
    again.load_state_dict(copy.deepcopy(paged[2].state_dict()))
    loaded = again.state[model.model.layers[0].mlp.up_proj.weight]
    assert all(
        torch.equal(loaded[name], value) and loaded[name].is_pinned()
        for name, value in large.items()
    )


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_an_update_makes_nobody_wait(name):
    _, model, optimizer = course(Optimizer(name=name, learning_rate=1e-3), count=2)
    ids = torch.arange(4, 68).cuda()[None]
    skip = torch.zeros((), dtype=torch.bool).cuda()
    released = ReleasedGradients(optimizer)
    loss = model(input_ids=ids, labels=ids).loss
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        released.begin(skip)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert released.norm().isfinite()
