"""One AdamW update of one parameter: a Triton kernel on a GPU, the same arithmetic in torch operations elsewhere.

8-bit moments are in blocks of 256 with an fp32 scale each, in the dynamic format of arXiv 2110.02861: each decade has
half as many values as the one above it. A second moment above 0 is never rounded to 0: the next update would be
divided by eps alone.

Why not a library: bitsandbytes 0.50 has no stochastic rounding and waits for the GPU after each parameter; torchao
0.18 draws from the global random state and saves tensor subclasses, which safe loading refuses.
"""

import math

import torch

BLOCK = 256
DECADES = {"exp_avg": 7, "exp_avg_sq": 8}  # one bit of the first moment is its sign
AT_ONCE = 2**20  # numbers, on a CPU
LOW_BITS = 0xFFFFFFFF


def update_directly(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_scale: torch.Tensor | None,
    exp_avg_sq_scale: torch.Tensor | None,
    companion: torch.Tensor | None,
    step: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    rounding: str,
    before: int,
    seed: int,
    learning_rate: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """AdamW (arXiv 1711.05101) in fp32, in place, over flat tensors.

    Args:
        exp_avg_scale: of each block of 8-bit moments; None if moments are fp32.
        companion: the fp32 weights for `rounding` "master", the rounding errors for "kahan".
        step: number of this update, fp32.
        grad_scale: divides the gradients.
        found_inf: skip the update if it is not 0; the host does not wait for it.
        rounding: "master", "kahan", "stochastic" or "nearest".
        before: offset of this piece in the parameter, so that pieces get the whole parameter's noise.
        seed: of the noise, together with `step`.
    """
    tensors = {
        "weights": weights,
        "gradients": gradients,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "exp_avg_scale": exp_avg_scale,
        "exp_avg_sq_scale": exp_avg_sq_scale,
        "companion": companion,
    }
    options = {
        "before": before,
        "seed": seed,
        "learning_rate": learning_rate,
        "decay": decay,
        "eps": eps,
        "log_beta1": log_of(beta1),
        "log_beta2": log_of(beta2),
    }
    if weights.is_cuda:
        from cpt.optim.adamw_kernel import launch  # only torch's CUDA builds include Triton

        tensors |= {"step": step, "grad_scale": grad_scale, "found_inf": found_inf}
        launch(tensors, options, rounding=rounding, block=BLOCK)
        torch.autograd.graph.increment_version(weights)  # as an operator of torch does
        return
    if found_inf is not None and found_inf:
        return
    for start in range(0, weights.numel(), AT_ONCE):
        piece: dict[str, torch.Tensor | None] = {}
        for name, tensor in tensors.items():
            piece[name] = None if tensor is None else part(name, tensor, start, start + AT_ONCE)
        piece_options = {**options, "before": before + start}
        update_in_torch(piece, piece_options, float(step), grad_scale, rounding)


def log_of(beta: float) -> float:
    """Return the logarithm, from which 1 - beta^step is computed without cancellation; exp(-1e9) is 0."""
    return math.log(beta) if beta else -1e9


# For tensors without values, and in compiled code. Otherwise torch's checks of an operator with 18 arguments take the
# host longer than the kernel's launch.
adamw_update = torch.library.custom_op(
    "cpt::adamw_update",
    update_directly,
    mutates_args=(
        "weights",
        "exp_avg",
        "exp_avg_sq",
        "exp_avg_scale",
        "exp_avg_sq_scale",
        "companion",
    ),
)


def can_launch(weights: torch.Tensor) -> bool:
    """Whether the kernel may be launched without the operator: on a GPU, for a plain tensor outside compiled code."""
    return weights.is_cuda and type(weights) is torch.Tensor and not torch.compiler.is_compiling()


@adamw_update.register_fake
def _(*arguments: object) -> None:
    return None


def part(name: str, tensor: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Slice a parameter, or one of its states, from `start`, the beginning of a block."""
    if name.endswith("_scale"):
        return tensor[start // BLOCK : -(-end // BLOCK)]
    return tensor[start:end]


def update_in_torch(
    tensors: dict[str, torch.Tensor | None],
    options: dict[str, float],
    step: float,
    grad_scale: torch.Tensor | None,
    rounding: str,
) -> None:
    weights, gradients, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, companion = (
        tensors.values()
    )
    assert weights is not None and gradients is not None, "given for each update"
    assert exp_avg is not None and exp_avg_sq is not None, "given for each update"
    gradient = gradients.float()
    if grad_scale is not None:
        gradient = gradient * (1 / grad_scale)
    weight = weights.float()
    if rounding == "master" and companion is not None:
        weight = companion
    elif rounding == "kahan" and companion is not None:
        weight = weight + companion.float()
    m = exp_avg
    v = exp_avg_sq
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        m = dequantize(exp_avg, exp_avg_scale, "exp_avg")
        v = dequantize(exp_avg_sq, exp_avg_sq_scale, "exp_avg_sq")
    m.add_(gradient - m, alpha=-math.expm1(options["log_beta1"]))
    v.add_(gradient.square() - v, alpha=-math.expm1(options["log_beta2"]))
    rate = options["learning_rate"]
    root = (v.sqrt() / math.sqrt(-math.expm1(step * options["log_beta2"]))).add_(options["eps"])
    change = m.div(root).mul_(rate / -math.expm1(step * options["log_beta1"]))
    weight = weight * (1 - rate * options["decay"]) - change
    if exp_avg_scale is not None and exp_avg_sq_scale is not None:
        quantize(m, exp_avg, exp_avg_scale, "exp_avg")
        quantize(v, exp_avg_sq, exp_avg_sq_scale, "exp_avg_sq")
    if rounding == "stochastic":
        weight = stochastic(weight, int(options["before"]), int(options["seed"]), int(step))
    weights.copy_(weight)
    if companion is not None:
        companion.copy_(weight if rounding == "master" else weight - weights.float())


def value_of(ranks: torch.Tensor, decades: int) -> torch.Tensor:
    """Return the center of each rank's interval; the 2^e ranks from 2^e on divide decade e, and rank 0 is 0."""
    e = ranks.clamp(min=1).log2().floor()
    values = 10 ** (e + 1 - decades) * (0.9 * (ranks + 0.5) / 2**e - 0.8)
    return torch.where(ranks > 0, values, 0.0)


def quantize(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, name: str) -> None:
    decades = DECADES[name]
    blocks = torch.nn.functional.pad(values.abs(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    scale.copy_(blocks.amax(1) / (1 - 0.45 / 2 ** (decades - 1)))
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    shares = (blocks * inverse[:, None]).view(-1)[: len(values)]
    rank = torch.zeros_like(shares)
    for e in range(decades):
        decade = 10.0 ** (e + 1 - decades)
        rank_in_decade = shares * (2**e / (0.9 * decade)) + 2**e * 0.8 / 0.9
        rank = torch.where(shares >= 0.1 * decade, rank_in_decade, rank)
    rank.clamp_(max=2**decades - 0.5)  # the copy truncates it to an integer
    if name == "exp_avg":
        codes.copy_(torch.where(values < 0, rank + 128, rank))
    else:
        codes.copy_(torch.where(values > 0, rank.clamp(min=1), 0.0))


def dequantize(codes: torch.Tensor, scale: torch.Tensor, name: str) -> torch.Tensor:
    scales = scale.repeat_interleave(BLOCK)[: len(codes)]
    if name == "exp_avg_sq":
        return value_of(codes.float(), DECADES[name]) * scales
    sizes = value_of((codes & 127).float(), DECADES[name]) * scales
    return sizes * torch.where(codes > 127, -1.0, 1.0)


def stochastic(weight: torch.Tensor, before: int, seed: int, step: int) -> torch.Tensor:
    """Round to bfloat16, kept in fp32, up or down so that the mean is unbiased (arXiv 2010.06192). The noise depends
    only on parameter, step and position: it needs no state, and a resumed run draws the same."""
    key = mixed(torch.tensor((int(mixed(torch.tensor(seed))) + step) & LOW_BITS))
    noise = mixed((torch.arange(before, before + len(weight)) & LOW_BITS) ^ key) & 0xFFFF
    rounded = weight.view(torch.int32).add(noise.int()).bitwise_and_(-65536).view(torch.float32)
    return torch.where(weight.isnan(), weight, rounded)


def mixed(x: torch.Tensor) -> torch.Tensor:
    """Hash to 32 pseudorandom bits, as the kernel does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & LOW_BITS
    x = (x ^ (x >> 15)) * 0x846CA68B & LOW_BITS
    return x ^ (x >> 16)
