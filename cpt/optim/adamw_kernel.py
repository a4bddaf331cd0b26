"""The Triton kernel of AdamW: moments in 8 bit or fp32; weights with a master copy, Kahan compensation or stochastic
rounding."""

from typing import Any

import triton
import triton.language as tl

WARPS = 8
# Blocks of a program: each thread has 16 numbers in 8 bit, or 8 in fp32, so that loads have 16 bytes.
ROWS_IN_8_BIT = 16
ROWS_IN_FP32 = 8


@triton.jit
def decode(rank, decades: tl.constexpr):
    """Decode ranks to values, as shares of the scale; see `cpt.optim.adamw_update.value_of`."""
    value = rank * 0.0
    for e in tl.static_range(decades):
        factor = 0.9 * 10.0 ** (e + 1 - decades) / 2**e
        offset = (0.45 / 2**e - 0.8) * 10.0 ** (e + 1 - decades)
        value = tl.where(rank >= 2.0**e, rank * factor + offset, value)
    return value


@triton.jit
def encode(value, decades: tl.constexpr):
    """Encode values to ranks, before truncation to integers."""
    rank = value * 0.0
    for e in tl.static_range(decades):
        factor = 2**e / (0.9 * 10.0 ** (e + 1 - decades))
        offset = 2**e * 0.8 / 0.9
        rank = tl.where(value >= 10.0 ** (e - decades), value * factor + offset, rank)
    return tl.minimum(rank, 2.0**decades - 0.5)


@triton.jit
def scales(values, decades: tl.constexpr):
    """Return the scale of each block, which gives its largest value the highest rank, and its inverse."""
    scale = tl.max(values, 1) / (1 - 0.45 / 2 ** (decades - 1))
    return scale, tl.where(scale > 0, 1 / scale, 0.0)[:, None]


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


@triton.jit(do_not_specialize=["before", "seed", "learning_rate", "decay"])
def adamw_kernel(
    weights,
    gradients,
    exp_avg,
    exp_avg_sq,
    exp_avg_scale,
    exp_avg_sq_scale,
    companion,
    step,
    grad_scale,
    found_inf,
    numbers,
    before,
    seed,
    learning_rate,
    decay,
    log_beta1,
    log_beta2,
    eps,
    rounding: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    """Update some blocks of a parameter, as `cpt.optim.adamw_update.update_in_torch` does."""
    # A parameter may have more than 2^31 bytes.
    first = tl.program_id(0).to(tl.int64) * (rows * block)
    number = tl.arange(0, rows)[:, None] * block + tl.arange(0, block)[None, :]
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    remaining = numbers - first
    if found_inf is not None:
        remaining = tl.where(tl.load(found_inf) != 0, 0, remaining)  # nothing is loaded or stored
    inside = number < remaining
    has_row = tl.arange(0, rows) * block < remaining

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
    if exp_avg_scale is not None:
        size = (
            decode((m & 127).to(tl.float32), 7)
            * tl.load(exp_avg_scale + row, has_row, other=0)[:, None]
        )
        m = tl.where(m > 127, -size, size)
        v = decode(v.to(tl.float32), 8) * tl.load(exp_avg_sq_scale + row, has_row, other=0)[:, None]

    steps = tl.load(step)
    m += one_minus_exp(log_beta1) * (gradient - m)
    v += one_minus_exp(log_beta2) * (gradient * gradient - v)
    root = tl.sqrt(v) / tl.sqrt(one_minus_exp(steps * log_beta2)) + eps
    weight = (
        weight * (1 - learning_rate * decay)
        - learning_rate / one_minus_exp(steps * log_beta1) * m / root
    )

    if exp_avg_scale is not None:
        scale, inverse = scales(tl.abs(m), 7)
        tl.store(exp_avg_scale + row, scale, has_row)
        tl.store(
            exp_avg + first + number,
            (encode(tl.abs(m) * inverse, 7) + tl.where(m < 0, 128, 0)).to(tl.uint8),
            inside,
        )
        scale, inverse = scales(v, 8)
        tl.store(exp_avg_sq_scale + row, scale, has_row)
        # At least 1 for a moment above 0: m / sqrt(0) would be a huge update.
        rank = tl.where(v > 0, tl.maximum(encode(v * inverse, 8), 1.0), 0.0)
        tl.store(exp_avg_sq + first + number, rank.to(tl.uint8), inside)
    else:
        tl.store(exp_avg + first + number, m, inside)
        tl.store(exp_avg_sq + first + number, v, inside)

    if rounding == "master":
        tl.store(companion + first + number, weight, inside)
    if weights.dtype.element_ty == tl.bfloat16:
        exact = weight
        noise = nearest(weight)
        if rounding == "stochastic":
            key = mixed(mixed(seed.to(tl.uint32)) + steps.to(tl.uint32))
            noise = (mixed((number + (first + before)).to(tl.uint32) ^ key) & 0xFFFF).to(tl.int32)
        weight = rounded(exact, noise)
        if rounding == "kahan":
            rest = exact - weight
            tl.store(
                companion + first + number, rounded(rest, nearest(rest)).to(tl.bfloat16), inside
            )
    tl.store(weights + first + number, weight.to(weights.dtype.element_ty), inside)


def launch(tensors: dict[str, Any], options: dict[str, Any], *, rounding: str, block: int) -> None:
    """Update a parameter, or a piece of one, as `cpt.optim.adamw_update.adamw_update` does."""
    rows = ROWS_IN_FP32 if tensors["exp_avg_scale"] is None else ROWS_IN_8_BIT
    size = tensors["weights"].numel()
    adamw_kernel[(triton.cdiv(size, rows * block),)](
        **tensors,
        numbers=size,
        **options,
        rounding=rounding,
        rows=rows,
        block=block,
        num_warps=WARPS,
    )
