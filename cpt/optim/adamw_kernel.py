"""The Triton kernel of AdamW: weights with a master copy, Kahan compensation or stochastic rounding."""

from typing import Any

import triton
import triton.language as tl

WARPS = 8
NUMBERS = 2048  # of a program: 8 for each thread, so that loads have 16 bytes


@triton.jit
def mixed(x):
    """Hash to 32 pseudorandom bits (github.com/skeeto/hash-prospector, lowbias32): 8 instructions; Philox: 80."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def one_minus_exp(x):
    """1 - exp(x) for x < 0, accurate near 0, too."""
    series = -x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7))))))
    return tl.where(x > -0.5, series, 1 - tl.exp(x))


@triton.jit
def rounded(x, noise):
    """Round to bfloat16, kept in fp32: add `noise` to the lower half of the bits, and keep the upper half."""
    upper = (x.to(tl.int32, bitcast=True) + noise) & -65536
    # The bits of a NaN would overflow.
    return tl.where(x == x, upper.to(tl.float32, bitcast=True), x)


@triton.jit
def nearest(x):
    """Noise for rounding to nearest even; Triton's interpreter would truncate."""
    return 0x7FFF + ((x.to(tl.int32, bitcast=True) >> 16) & 1)


@triton.jit(do_not_specialize=["seed", "learning_rate", "decay"])
def adamw_kernel(
    weights,
    gradients,
    exp_avg,
    exp_avg_sq,
    companion,
    step,
    grad_scale,
    found_inf,
    numbers,
    seed,
    learning_rate,
    decay,
    log_beta1,
    log_beta2,
    eps,
    rounding: tl.constexpr,
    at_once: tl.constexpr,
):
    """Update a part of a parameter, as `cpt.optim.adamw_update.update_in_torch` does."""
    # A parameter may have more than 2^31 bytes.
    first = tl.program_id(0).to(tl.int64) * at_once
    number = tl.arange(0, at_once)
    remaining = numbers - first
    if found_inf is not None:
        remaining = tl.where(tl.load(found_inf) != 0, 0, remaining)  # nothing is loaded or stored
    inside = number < remaining

    gradient = tl.load(gradients + first + number, inside, other=0).to(tl.float32)
    if grad_scale is not None:
        gradient *= 1 / tl.load(grad_scale)
    weight = tl.load(
        (companion if rounding == "master" else weights) + first + number, inside, other=0
    ).to(tl.float32)
    if rounding == "kahan":
        weight += tl.load(companion + first + number, inside, other=0).to(tl.float32)
    m = tl.load(exp_avg + first + number, inside, other=0)
    v = tl.load(exp_avg_sq + first + number, inside, other=0)

    steps = tl.load(step)
    m += one_minus_exp(log_beta1) * (gradient - m)
    v += one_minus_exp(log_beta2) * (gradient * gradient - v)
    root = tl.sqrt(v) / tl.sqrt(one_minus_exp(steps * log_beta2)) + eps
    weight = (
        weight * (1 - learning_rate * decay)
        - learning_rate / one_minus_exp(steps * log_beta1) * m / root
    )

    tl.store(exp_avg + first + number, m, inside)
    tl.store(exp_avg_sq + first + number, v, inside)

    if rounding == "master":
        tl.store(companion + first + number, weight, inside)
    if weights.dtype.element_ty == tl.bfloat16:
        exact = weight
        noise = nearest(weight)
        if rounding == "stochastic":
            key = mixed(mixed(seed.to(tl.uint32)) + steps.to(tl.uint32))
            noise = (mixed((number + first).to(tl.uint32) ^ key) & 0xFFFF).to(tl.int32)
        weight = rounded(exact, noise)
        if rounding == "kahan":
            rest = exact - weight
            tl.store(
                companion + first + number, rounded(rest, nearest(rest)).to(tl.bfloat16), inside
            )
    tl.store(weights + first + number, weight.to(weights.dtype.element_ty), inside)


def launch(tensors: dict[str, Any], options: dict[str, Any], *, rounding: str) -> None:
    """Update a parameter as `cpt.optim.adamw_update.adamw_update` does."""
    size = tensors["weights"].numel()
    adamw_kernel[(triton.cdiv(size, NUMBERS),)](
        **tensors,
        numbers=size,
        **options,
        rounding=rounding,
        at_once=NUMBERS,
        num_warps=WARPS,
    )
