"""What only a CUDA GPU can show of optimizers in little memory: kernels, pages, and that the host does not wait."""

import io

import pytest
import torch
from tiny import TINY_LLAMA
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.optim import bnb
from cpt.optim.adamw_update import adamw_update
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
    return more_steps(model, optimizer, count=count), model, optimizer


def more_steps(model, optimizer, *, count=4, released=None):
    """Losses of steps, whose gradients are released if `released` is given."""
    ids = torch.randint(4, 300, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(count):
        loss = model(input_ids=ids, labels=ids).loss
        if released is not None:
            released.begin(None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def states_after_updates(device, weights, *, rounding, skips):
    """Weights and states after three updates, of which the second may be skipped."""
    size = len(weights)
    companions = {"master": weights.float(), "kahan": torch.zeros_like(weights)}
    tensors = {
        "exp_avg": torch.zeros(size),
        "exp_avg_sq": torch.zeros(size),
        "companion": companions.get(rounding),
        "weights": weights,
    }
    tensors = {
        name: None if of is None else of.to(device, copy=True) for name, of in tensors.items()
    }
    options = {
        "learning_rate": 1e-3,
        "decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
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
def test_the_kernel_has_the_numbers_of_a_cpu(rounding, skips):
    weights = torch.randn(25_607, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected, updated = (
        states_after_updates(device, weights, rounding=rounding, skips=skips)
        for device in ("cpu", "cuda")
    )
    for name, tensor in expected.items():
        if tensor.dtype == torch.float32:
            torch.testing.assert_close(updated[name], tensor, rtol=1e-4, atol=1e-7)
        else:
            assert (updated[name] != tensor).float().mean() < 0.01


@pytest.mark.quantized
@pytest.mark.parametrize("rounding", ["stochastic", None])
def test_pages_of_bitsandbytes_change_no_number_and_are_pages_again_after_loading(
    monkeypatch, rounding
):
    monkeypatch.setattr(bnb, "AT_ONCE", 2**16)  # several parts of a matrix
    plain, paged = (
        course(Optimizer(name=name, learning_rate=1e-3, rounding=rounding))
        for name in ("adamw_8bit", "paged_adamw_8bit")
    )
    assert paged[0] == plain[0]
    for weight, other in zip(plain[1].parameters(), paged[1].parameters(), strict=True):
        assert torch.equal(weight, other)
    file = io.BytesIO()
    torch.save(paged[2].state_dict(), file)
    file.seek(0)
    model = built()
    model.load_state_dict(paged[1].state_dict())
    section = Optimizer(name="paged_adamw_8bit", learning_rate=1e-3, rounding=rounding)
    resumed = build_optimizer(section, model)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    state = resumed.state[model.model.layers[0].mlp.up_proj.weight]
    assert state["state1"].is_paged and state["state1"].device.type == "cpu"
    again = more_steps(model, resumed)
    assert again == more_steps(*paged[1:])
    for weight, other in zip(model.parameters(), paged[1].parameters(), strict=True):
        assert torch.equal(weight, other)


@pytest.mark.quantized
@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_released_gradients_give_bitsandbytes_the_same_steps(name):
    section = Optimizer(name=name, learning_rate=1e-3)
    losses, whole, _ = course(section)
    model = built()
    optimizer = build_optimizer(section, model)
    released = ReleasedGradients(optimizer)
    assert more_steps(model, optimizer, released=released) == losses
    for weight, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_the_host_does_not_wait_for_an_update():
    _, model, optimizer = course(Optimizer(name="adamw", learning_rate=1e-3), count=2)
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
