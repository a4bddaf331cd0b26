import copy

import pytest
import torch
from tiny_training import learns_and_resumes, steps, tiny_llama

from cpt.optim import master_weights
from cpt.optim.build import build_optimizer
from cpt.optim.master_weights import AdamWWithMaster, in_parts
from cpt.recipe.schema import Optimizer

SMALL = 1e-5  # a rate of continued pre-training: 100 updates of a weight of 0.02 move it by less than a bfloat16 can show at once


def pulled(dtype, optimizer_of, count=60):
    """Weights of a usual size that are pulled one way, a little at each step."""
    weights = torch.nn.Parameter(torch.linspace(0.01, 0.04, 512).to(dtype))
    optimizer = optimizer_of([{"params": [weights]}])
    for _ in range(count):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    return weights.detach().float() - torch.linspace(0.01, 0.04, 512).to(torch.bfloat16)


def with_master(groups):
    return AdamWWithMaster(groups, lr=SMALL, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


def without(groups):
    return torch.optim.AdamW(groups, lr=SMALL, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)


def test_small_updates_are_lost_in_bfloat16_and_arrive_with_a_master_copy():
    whole = pulled(torch.float32, without).mean()
    assert whole == pytest.approx(-60 * SMALL, rel=0.05)
    assert pulled(torch.bfloat16, without).mean() > 0.2 * whole, "nearly all stand still"
    assert pulled(torch.bfloat16, with_master).mean() == pytest.approx(float(whole), rel=0.05)


def course(dtype, name="adamw", rate=SMALL, count=60, **options):
    return steps(trained := tiny_llama(dtype), build_optimizer(Optimizer(name=name, learning_rate=rate, **options), trained), count)


def test_the_loss_of_bfloat16_weights_follows_that_of_fp32_weights_and_stalls_without_a_master():
    whole, kept, rounded = course("float32"), course("bfloat16"), course("bfloat16", rounding="nearest")
    fallen = [losses[0] - losses[-1] for losses in (whole, kept, rounded)]
    assert fallen[1] == pytest.approx(fallen[0], rel=0.05)
    assert fallen[2] < 0.3 * fallen[0]


def test_it_learns_and_goes_on_from_its_saved_state_bit_for_bit():
    learns_and_resumes(Optimizer(name="adamw", learning_rate=5e-3), "bfloat16")


def test_states_are_fp32_and_fp32_parameters_have_no_second_copy():
    half, full = (torch.nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    optimizer = with_master([{"params": [half, full]}])
    reference = copy.deepcopy(full)
    plain = without([{"params": [reference]}])
    for parameter in (half, full, reference):
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    plain.step()
    assert torch.equal(full, reference)
    assert {name: value.dtype for name, value in optimizer.state[half].items()} == dict.fromkeys(
        ("step", "exp_avg", "exp_avg_sq", "master"), torch.float32
    )
    assert "master" not in optimizer.state[full]


def test_a_flag_on_the_device_leaves_the_step_out_and_a_scale_divides_the_gradient():
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = with_master([{"params": [parameter]}])
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[parameter].items()}
    optimizer.found_inf = torch.ones(())
    parameter.grad.fill_(torch.nan)
    optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in optimizer.state[parameter].items())
    optimizer.found_inf, optimizer.grad_scale = None, torch.tensor(8.0)
    parameter.grad.fill_(4.0)
    optimizer.step()
    assert torch.allclose(optimizer.state[parameter]["exp_avg"], 0.9 * before["exp_avg"] + 0.1 * 0.5)


def test_parts_change_nothing(monkeypatch):
    at_once = course("bfloat16", count=5)
    monkeypatch.setattr(master_weights, "AT_ONCE", 1000)
    assert course("bfloat16", count=5) == at_once
    sizes = [[parameter.numel() for parameter in part] for part in in_parts([torch.zeros(n) for n in (400, 500, 200, 3000, 1)])]
    assert sizes == [[400, 500], [200], [3000], [1]]
