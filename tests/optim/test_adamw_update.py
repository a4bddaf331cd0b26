"""One update of AdamW against fp64, and the kernel against torch's operations."""

import math
import os
import subprocess
import sys

import pytest
import torch

from cpt.optim.adamw_update import BLOCK, DECADES, adamw_update, dequantize, quantize, stochastic

OPTIONS = {"learning_rate": 1e-3, "decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


def random(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def states(weights, *, eight_bit, rounding):
    size, dtype = len(weights), torch.uint8 if eight_bit else torch.float32
    scales = {
        f"{name}_scale": torch.zeros(-(-size // BLOCK)) if eight_bit else None for name in DECADES
    }
    companion = {"master": weights.float(), "kahan": torch.zeros(size, dtype=torch.bfloat16)}.get(
        rounding
    )
    return {
        **{name: torch.zeros(size, dtype=dtype) for name in DECADES},
        **scales,
        "companion": companion,
    }


def run(weights, *, eight_bit=False, rounding="nearest", before=0, **flags):
    """The tensors after five steps of random gradients, whose numbers depend on the place in the whole parameter."""
    tensors = {
        "weights": weights.clone(),
        **states(weights, eight_bit=eight_bit, rounding=rounding),
    }
    for step in range(1, 6):
        each = {"found_inf": None, "grad_scale": None, **flags, "step": torch.tensor(float(step))}
        each["gradients"] = (random(before + len(weights), step)[before:] * 1e-2).to(weights.dtype)
        adamw_update(**tensors, **each, rounding=rounding, before=before, seed=7, **OPTIONS)
    return tensors


def in_fp64(weights):
    exact = torch.nn.Parameter(weights.double())
    optimizer = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        exact.grad = (random(len(weights), step) * 1e-2).to(weights.dtype).double()
        optimizer.step()
    return exact.detach()


@pytest.mark.parametrize(("eight_bit", "tolerance"), [(False, 1e-6), (True, 3e-4)])
def test_weights_their_master_and_kahans_sum_are_those_of_fp64(eight_bit, tolerance):
    weights = random(5000)
    found = run(weights, eight_bit=eight_bit)["weights"].double()
    assert (found - in_fp64(weights)).abs().max() < tolerance
    exact = in_fp64(weights.bfloat16())
    master, kahan = (
        run(weights.bfloat16(), eight_bit=eight_bit, rounding=name) for name in ("master", "kahan")
    )
    assert (master["companion"].double() - exact).abs().max() < tolerance
    assert torch.equal(master["weights"], master["companion"].bfloat16())
    both = kahan["weights"].double() + kahan["companion"].double()
    assert ((both - exact).abs() <= tolerance + exact.abs() * 2**-14).all(), "16 bits of the weight"


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


@pytest.mark.parametrize("name", list(DECADES))
def test_8_bit_values_are_within_a_share_of_their_own_and_the_largest_is_exact(name):
    values = random(3 * BLOCK + 7, 1) ** 3
    values = values if name == "exp_avg" else values.square()
    values[:BLOCK] *= 1e-6
    codes, scale = torch.zeros(len(values), dtype=torch.uint8), torch.zeros(4)
    quantize(values, codes, scale, name)
    again = dequantize(codes, scale, name)
    for block in range(4):
        place = slice(block * BLOCK, (block + 1) * BLOCK)
        largest = values[place].abs().max()
        assert (again[place] - values[place]).abs().max() < (
            0.01 if name == "exp_avg" else 0.005
        ) * largest
        assert again[place].abs().max() == pytest.approx(largest.item(), rel=1e-6)
    again_codes, again_scale = torch.zeros_like(codes), torch.zeros(4)
    quantize(again, again_codes, again_scale, name)
    torch.testing.assert_close(
        dequantize(again_codes, again_scale, name), again, rtol=1e-6, atol=0.0
    )


@pytest.mark.parametrize(
    ("rounding", "eight_bit"),
    [("master", True), ("kahan", False), ("stochastic", True), ("nearest", False)],
)
def test_pieces_are_the_whole_and_a_flag_leaves_everything_as_it_was(eight_bit, rounding):
    weights, kind = random(5000).bfloat16(), {"eight_bit": eight_bit, "rounding": rounding}
    whole = run(weights, **kind)
    for first, last in ((0, 2048), (2048, 5000)):
        piece = run(weights[first:last], before=first, **kind)
        assert torch.equal(piece["weights"], whole["weights"][first:last])
    skipped, taken = (
        run(weights, found_inf=flag, **kind) for flag in (torch.ones(()), torch.zeros(()))
    )
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
grid = [(True, "master", half), (False, "kahan", half), (True, "stochastic", half), (False, "nearest", half)]
for eight_bit, rounding, dtype in [*grid, (True, "nearest", full), (False, "master", torch.float16)]:
    for size in (17, 2200) if rounding == "stochastic" else (2200,):
        weights = random(size).to(dtype)
        kernel, torchs = ({"weights": weights.clone(), **states(weights, eight_bit=eight_bit, rounding=rounding)} for _ in range(2))
        for step in (1.0, 2.0):
            each = {"gradients": (random(size, int(step)) * 1e-2).to(dtype), "step": torch.tensor(step)}
            for found_inf in (torch.zeros(()) if eight_bit else None, torch.ones(())):
                each |= {"grad_scale": torch.tensor(0.5), "found_inf": found_inf}
                place = {"before": 512, "seed": 11}
                on_gpu = {**kernel, "weights": kernel["weights"].as_subclass(OnGpu)}
                update_directly(**on_gpu, **each, **place, **OPTIONS, rounding=rounding)
                adamw_update(**torchs, **each, **place, **OPTIONS, rounding=rounding)
        for name, found in kernel.items():
            if found is not None and found.dtype == torch.uint8:
                differ = (found != torchs[name]).float().mean()
                assert (found.int() - torchs[name].int()).abs().max() <= 1 and differ < 1e-3, (name, rounding)
            elif found is not None:
                tolerance = {"rtol": 1e-2, "atol": 1e-6} if found.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-7}
                torch.testing.assert_close(found, torchs[name], **tolerance)
                differ = (found != torchs[name]).float().mean()
                assert found.dtype == torch.float32 or differ < 0.01, (name, rounding, differ)
"""  # noqa: E501


@pytest.mark.slow
def test_the_kernel_has_the_numbers_of_torchs_operations_in_tritons_interpreter():
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
