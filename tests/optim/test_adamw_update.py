"""One update of AdamW against fp64, and the kernel against torch's operations."""

import math
import os
import subprocess
import sys

import pytest
import torch

from cpt.optim.adamw_update import adamw_update, stochastic

OPTIONS = {"learning_rate": 1e-3, "decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def random(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def states(weights, *, rounding):
    size = len(weights)
    companions = {"master": weights.float(), "kahan": torch.zeros(size, dtype=torch.bfloat16)}
    return {
        "exp_avg": torch.zeros(size),
        "exp_avg_sq": torch.zeros(size),
        "companion": companions.get(rounding),
    }


def run(weights, *, rounding="nearest", **flags):
    """The tensors after five steps of random gradients."""
    tensors = {"weights": weights.clone(), **states(weights, rounding=rounding)}
    for step in range(1, 6):
        each = {"found_inf": None, "grad_scale": None, **flags, "step": torch.tensor(float(step))}
        each["gradients"] = (random(len(weights), step) * 1e-2).to(weights.dtype)
        adamw_update(**tensors, **each, rounding=rounding, seed=7, **OPTIONS)
    return tensors


def in_fp64(weights):
    exact = torch.nn.Parameter(weights.double())
    optimizer = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        exact.grad = (random(len(weights), step) * 1e-2).to(weights.dtype).double()
        optimizer.step()
    return exact.detach()


def test_weights_their_master_and_kahans_sum_are_those_of_fp64():
    weights = random(5000)
    updated = run(weights)["weights"].double()
    assert (updated - in_fp64(weights)).abs().max() < 1e-6
    exact = in_fp64(weights.bfloat16())
    master, kahan = (run(weights.bfloat16(), rounding=name) for name in ("master", "kahan"))
    assert (master["companion"].double() - exact).abs().max() < 1e-6
    assert torch.equal(master["weights"], master["companion"].bfloat16())
    both = kahan["weights"].double() + kahan["companion"].double()
    assert ((both - exact).abs() <= 1e-6 + exact.abs() * 2**-14).all(), "16 bits of the weight"


def test_the_mean_of_stochastic_rounding_is_the_number_itself():
    between = torch.full((400_000,), 1.0 + 2**-7 * 0.3)  # bfloat16 has 1 and 1 + 2**-7
    for value in (between, -between):
        found = stochastic(value, 0, 3, 1)
        assert set(found.abs().tolist()) == {1.0, 1.0 + 2**-7}
        assert found.mean().item() == pytest.approx(value[0].item(), abs=2**-7 * 0.004)
    errors = [
        (stochastic(x := random(2**16, seed), 0, 5, seed) - x).double().mean().item()
        for seed in range(16)
    ]
    assert abs(sum(errors) / 16) < 4 * 2**-9 / math.sqrt(16 * 2**16), "the mean error goes to 0"


DRAWN = {  # (place, parameter, step) -> which are rounded up
    (0, 0, 1): "0010110000010001110110100110111010011011110110111011111010010010",
    (256, 7, 3): "0001000110100011101100000001001111110100011110101011001100000001",
    (2**20, 12345, 100_000): "0101110010110011010110010110111101110111101011100001000111011010",
}


def test_the_noise_of_a_place_and_step_is_the_same_in_every_version():
    """A run that resumes under a later version draws the same."""
    halves = torch.full((64,), 1 + 2**-8)  # between two numbers of bfloat16
    drawn = {
        where: "".join(str(int(value > 1)) for value in stochastic(halves, *where).tolist())
        for where in DRAWN
    }
    assert drawn == DRAWN
    assert stochastic(torch.tensor([math.nan, 1.0]), 0, 0, 1).isnan().tolist() == [True, False]


@pytest.mark.parametrize("rounding", ["master", "kahan", "stochastic", "nearest"])
def test_parts_are_the_whole_and_a_flag_leaves_everything_as_it_was(monkeypatch, rounding):
    weights = random(5000).bfloat16()
    whole = run(weights, rounding=rounding)
    monkeypatch.setattr("cpt.optim.adamw_update.AT_ONCE", 2048)
    in_parts = run(weights, rounding=rounding)
    assert torch.equal(in_parts["weights"], whole["weights"])
    skipped = run(weights, found_inf=torch.ones(()), rounding=rounding)
    taken = run(weights, found_inf=torch.zeros(()), rounding=rounding)
    assert torch.equal(skipped["weights"], weights) and not skipped["exp_avg"].any()
    assert torch.equal(taken["weights"], whole["weights"])


def test_a_scale_divides_the_gradient():
    scaled = run(random(1000), grad_scale=torch.tensor(4.0))
    assert torch.equal(scaled["exp_avg"] * 4, run(random(1000))["exp_avg"])


KERNEL = """
import torch
from cpt.optim.adamw_update import adamw_update, update_directly
from optim.test_adamw_update import OPTIONS, random, states

class OnGpu(torch.Tensor):
    is_cuda = True

half, full = torch.bfloat16, torch.float32
grid = [("master", half), ("kahan", half), ("stochastic", half), ("nearest", half)]
for rounding, dtype in [*grid, ("nearest", full), ("master", torch.float16)]:
    for size in (17, 2200) if rounding == "stochastic" else (2200,):
        weights = random(size).to(dtype)
        kernel, torchs = ({"weights": weights.clone(), **states(weights, rounding=rounding)} for _ in range(2))
        for step in (1.0, 2.0):
            each = {"gradients": (random(size, int(step)) * 1e-2).to(dtype), "step": torch.tensor(step)}
            for found_inf in (torch.zeros(()) if step == 1 else None, torch.ones(())):
                each |= {"grad_scale": torch.tensor(0.5), "found_inf": found_inf, "seed": 11}
                on_gpu = {**kernel, "weights": kernel["weights"].as_subclass(OnGpu)}
                update_directly(**on_gpu, **each, **OPTIONS, rounding=rounding)
                adamw_update(**torchs, **each, **OPTIONS, rounding=rounding)
        for name, value in kernel.items():
            if value is not None:
                tolerance = {"rtol": 1e-2, "atol": 1e-6} if value.dtype == half else {"rtol": 1e-4, "atol": 1e-7}
                torch.testing.assert_close(value, torchs[name], **tolerance)
                differ = (value != torchs[name]).float().mean()
                assert value.dtype == torch.float32 or differ < 0.01, (name, rounding, differ)
"""  # noqa: E501


@pytest.mark.slow
def test_the_kernel_has_the_numbers_of_torchs_operations_in_tritons_interpreter():
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
