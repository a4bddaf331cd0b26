"""One update of AdamW: against fp64, the kernel against torch's operations, and the bytes that it moves."""

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
    scales = {f"{name}_scale": torch.zeros(-(-size // BLOCK)) if eight_bit else None for name in DECADES}
    beside = {"master": weights.float(), "kahan": torch.zeros(size, dtype=torch.bfloat16)}.get(rounding)
    return {**{name: torch.zeros(size, dtype=dtype) for name in DECADES}, **scales, "beside": beside}


def run(
    weights,
    *,
    eight_bit=False,
    rounding="nearest",
    count=5,
    found_inf=None,
    grad_scale=None,
    before=0,
    gradient_dtype=None,
):
    """The tensors after some steps of random gradients, whose numbers depend on the place in the whole parameter."""
    tensors = {"weights": weights.clone(), **states(weights, eight_bit=eight_bit, rounding=rounding)}
    for step in range(1, count + 1):
        gradients = (random(before + len(weights), step)[before:] * 1e-2).to(gradient_dtype or weights.dtype)
        adamw_update(
            **tensors,
            gradients=gradients,
            step=torch.tensor(float(step)),
            found_inf=found_inf,
            grad_scale=grad_scale,
            rounding=rounding,
            before=before,
            seed=7,
            **OPTIONS,
        )
    return tensors


def in_fp64(weights, count=5):
    exact = torch.nn.Parameter(weights.double())
    optimizer = torch.optim.AdamW([exact], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, count + 1):
        exact.grad = (random(len(weights), step) * 1e-2).to(weights.dtype).double()
        optimizer.step()
    return exact.detach()


@pytest.mark.parametrize(("eight_bit", "tolerance"), [(False, 1e-6), (True, 3e-4)])
def test_fp32_weights_are_those_of_fp64(eight_bit, tolerance):
    weights = random(5000)
    assert (run(weights, eight_bit=eight_bit)["weights"].double() - in_fp64(weights)).abs().max() < tolerance


@pytest.mark.parametrize("eight_bit", [False, True])
def test_a_master_and_kahans_sum_are_the_fp64_weight_and_the_weight_is_one_of_them_rounded(eight_bit):
    weights = random(5000).bfloat16()
    exact, tolerance = in_fp64(weights), 3e-4 if eight_bit else 1e-6
    master, kahan = (run(weights, eight_bit=eight_bit, rounding=rounding) for rounding in ("master", "kahan"))
    assert (master["beside"].double() - exact).abs().max() < tolerance
    assert torch.equal(master["weights"], master["beside"].bfloat16())
    both = kahan["weights"].double() + kahan["beside"].double()
    assert ((both - exact).abs() <= tolerance + exact.abs() * 2**-14).all(), "16 bits of the weight"


def test_the_mean_of_stochastic_rounding_is_the_number_itself():
    between = torch.full((400_000,), 1.0 + 2**-7 * 0.3)  # bfloat16 has 1 and 1 + 2**-7
    for value in (between, -between):
        found = stochastic(value, 0, 3, 1)
        assert set(found.abs().tolist()) == {1.0, 1.0 + 2**-7}
        assert found.mean().item() == pytest.approx(value[0].item(), abs=2**-7 * 0.004)
    errors = [(stochastic(x := random(2**16, seed), 0, 5, seed) - x).double().mean().item() for seed in range(16)]
    assert abs(sum(errors) / 16) < 4 * 2**-9 / math.sqrt(16 * 2**16), "the mean error goes to 0"


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
        assert (again[place] - values[place]).abs().max() < (0.01 if name == "exp_avg" else 0.005) * largest
        assert again[place].abs().max() == pytest.approx(largest.item(), rel=1e-6)
    again_codes, again_scale = torch.zeros_like(codes), torch.zeros(4)
    quantize(again, again_codes, again_scale, name)
    torch.testing.assert_close(dequantize(again_codes, again_scale, name), again, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("rounding", ["master", "kahan", "stochastic", "nearest"])
@pytest.mark.parametrize("eight_bit", [True, False])
def test_pieces_are_the_whole_and_a_flag_leaves_everything_as_it_was(eight_bit, rounding):
    weights = random(5000).bfloat16()
    whole = run(weights, eight_bit=eight_bit, rounding=rounding)
    for first, last in ((0, 2048), (2048, 5000)):
        piece = run(weights[first:last], eight_bit=eight_bit, rounding=rounding, before=first)
        assert torch.equal(piece["weights"], whole["weights"][first:last])
    left_out = run(weights, eight_bit=eight_bit, rounding=rounding, found_inf=torch.ones(()))
    assert torch.equal(left_out["weights"], weights) and not left_out["exp_avg"].any()
    assert torch.equal(
        run(weights, eight_bit=eight_bit, rounding=rounding, found_inf=torch.zeros(()))["weights"], whole["weights"]
    )


def test_a_scale_divides_the_gradient():
    weights = random(1000)
    assert torch.equal(run(weights, grad_scale=torch.tensor(1.0))["exp_avg"], run(weights)["exp_avg"])
    assert torch.equal(run(weights, grad_scale=torch.tensor(4.0))["exp_avg"] * 4, run(weights)["exp_avg"])


# --- the kernel ------------------------------------------------------------------------------------------------------

KERNEL = """
import math
import torch
from cpt.optim import adamw_kernel
from cpt.optim.adamw_update import BLOCK, DECADES, adamw_update
from optim.test_adamw_update import OPTIONS, random, states

options = {"learning_rate": 1e-3, "decay": 0.1, "eps": 1e-8, "log_beta1": math.log(0.9), "log_beta2": math.log(0.95)}
grid = [(True, r, torch.bfloat16) for r in ("master", "kahan", "stochastic", "nearest")] + [(True, "nearest", torch.float32)]
grid += [(False, r, d) for _, r, d in grid] + [(False, "master", torch.float16)]
for eight_bit, rounding, dtype in grid:
    for size in (17, 4400) if rounding == "stochastic" else (4400,):
        weights = random(size).to(dtype)
        kernel, torchs = ({"weights": weights.clone(), **states(weights, eight_bit=eight_bit, rounding=rounding)} for _ in range(2))
        for step in (1.0, 2.0):
            each = {"gradients": (random(size, int(step)) * 1e-2).to(dtype), "step": torch.tensor(step)}
            for found_inf in (torch.zeros(()) if eight_bit else None, torch.ones(())):
                each |= {"grad_scale": torch.tensor(0.5), "found_inf": found_inf}
                place = {"before": 512, "seed": 11}
                adamw_kernel.launch({**kernel, **each}, {**options, **place}, rounding=rounding, block=BLOCK)
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


def test_the_kernel_has_the_numbers_of_torchs_operations_in_tritons_interpreter():
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
