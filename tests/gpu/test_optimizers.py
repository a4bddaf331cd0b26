"""What only a CUDA GPU can show of optimizers in little memory: pages, peaks, and that nobody waits."""

import copy

import pytest
import torch
from tiny import TINY_LLAMA
from tiny_models import make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.models.build import build_model
from cpt.optim import small_adamw
from cpt.optim.build import build_optimizer
from cpt.optim.released import ReleasedGradients
from cpt.recipe.schema import Model, Optimizer

pytestmark = pytest.mark.gpu
SHAPE = {**TINY_LLAMA, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "max_position_embeddings": 256}


def built():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE), dtype=torch.bfloat16).cuda()


def course(section, *, releases=False, count=4):
    """Losses, the model, its optimizer and the peak of the last step in bytes beyond weights and states."""
    model = built()
    optimizer = build_optimizer(section, model)
    released = ReleasedGradients(optimizer) if releases else None
    ids = torch.randint(4, 300, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(count):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(input_ids=ids, labels=ids).loss
        if released is not None:
            released.begin(None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        peak = torch.cuda.max_memory_allocated() - before
    return losses, model, optimizer, peak


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_pages_change_nothing_and_leave_the_gpu(monkeypatch, rounding):
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(small_adamw, "PIECE", 2**18)  # several pieces a matrix
    here = course(Optimizer(name="adamw_8bit", learning_rate=1e-3, rounding=rounding))
    paged = course(Optimizer(name="paged_adamw_8bit", learning_rate=1e-3, rounding=rounding))
    assert paged[0] == here[0]
    assert all(torch.equal(one, other) for one, other in zip(here[1].parameters(), paged[1].parameters(), strict=True))
    state = paged[2].state[paged[1].model.layers[0].mlp.up_proj.weight]
    large = {name: value for name, value in state.items() if isinstance(value, torch.Tensor) and value.dim()}
    assert all(value.device.type == "cpu" and value.is_pinned() for value in large.values())
    again = build_optimizer(Optimizer(name="paged_adamw_8bit", learning_rate=1e-3, rounding=rounding), model := built())
    again.load_state_dict(copy.deepcopy(paged[2].state_dict()))
    loaded = again.state[model.model.layers[0].mlp.up_proj.weight]
    assert all(torch.equal(loaded[name], value) and loaded[name].is_pinned() for name, value in large.items())


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_an_update_makes_nobody_wait(name):
    if name != "adamw":
        pytest.importorskip("bitsandbytes")
    _, model, optimizer, _ = course(Optimizer(name=name, learning_rate=1e-3), count=2)
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


def test_released_gradients_lower_the_peak_and_change_no_loss():
    pytest.importorskip("bitsandbytes")
    section = Optimizer(name="adamw_8bit", learning_rate=1e-3)
    whole, parts = course(section), course(section, releases=True)
    assert parts[0] == whole[0]
    all_gradients = sum(parameter.nbytes for parameter in whole[1].parameters())
    assert parts[3] < whole[3] - 0.5 * all_gradients


def test_a_model_in_4_bit_learns(tmp_path):
    pytest.importorskip("bitsandbytes")
    tokenizer = make_tokenizer()
    built().save_pretrained(tmp_path)
    model = build_model(Model(path=str(tmp_path), dtype="bfloat16", lora={"r": 8, "quantize": "nf4"}), tokenizer).cuda()
    optimizer = build_optimizer(Optimizer(learning_rate=1e-3), model)
    ids = torch.randint(4, 300, (2, 64), generator=torch.Generator().manual_seed(1)).cuda()
    losses = []
    for _ in range(8):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
