"""One AdamW update of one parameter: a Triton kernel on a GPU, the same arithmetic in torch operations elsewhere."""

import math
from typing import TypeVar

import torch

AT_ONCE = 2**20  # numbers, on a CPU
LOW_BITS = 0xFFFFFFFF
Number = TypeVar("Number", int, torch.Tensor)


def update_directly(
    weights: torch.Tensor,
    gradients: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    companion: torch.Tensor | None,
    step: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    rounding: str,
    seed: int,
    learning_rate: float,
    decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """AdamW (arXiv 1711.05101) in fp32, in place, over flat tensors.

    Args:
        companion: the fp32 weights for `rounding` "master", the rounding errors for "kahan".
        step: number of this update, fp32.
        grad_scale: divides the gradients.
        found_inf: skip the update if it is not 0; the host does not wait for it.
        rounding: "master", "kahan", "stochastic" or "nearest".
        seed: of the noise, together with `step`.
    """
    tensors = {
        "weights": weights,
        "gradients": gradients,
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
        "companion": companion,
    }
    options = {
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
        launch(tensors, options, rounding=rounding)
        torch.autograd.graph.increment_version(weights)  # as an operator of torch does
        return
    if found_inf is not None and found_inf:
        return
    for start in range(0, weights.numel(), AT_ONCE):
        piece: dict[str, torch.Tensor | None] = {}
        for name, tensor in tensors.items():
            piece[name] = None if tensor is None else tensor[start : start + AT_ONCE]
        update_in_torch(piece, {**options, "before": start}, float(step), grad_scale, rounding)


def log_of(beta: float) -> float:
    """Return the logarithm, from which 1 - beta^step is computed without cancellation; exp(-1e9) is 0."""
    return math.log(beta) if beta else -1e9


# For tensors without values, and in compiled code. Otherwise torch's checks of an operator with 15 arguments take the
# host longer than the kernel's launch.
adamw_update = torch.library.custom_op(
    "cpt::adamw_update",
    update_directly,
    mutates_args=("weights", "exp_avg", "exp_avg_sq", "companion"),
)


def can_launch(weights: torch.Tensor) -> bool:
    """Whether the kernel may be launched without the operator: on a GPU, for a plain tensor outside compiled code."""
    return weights.is_cuda and type(weights) is torch.Tensor and not torch.compiler.is_compiling()


@adamw_update.register_fake
def _(*arguments: object) -> None:
    return None


def update_in_torch(
    tensors: dict[str, torch.Tensor | None],
    options: dict[str, float],
    step: float,
    grad_scale: torch.Tensor | None,
    rounding: str,
) -> None:
    weights, gradients, m, v, companion = tensors.values()
    assert weights is not None and gradients is not None, "given for each update"
    assert m is not None and v is not None, "given for each update"
    gradient = gradients.float()
    if grad_scale is not None:
        gradient = gradient * (1 / grad_scale)
    weight = weights.float()
    if rounding == "master" and companion is not None:
        weight = companion
    elif rounding == "kahan" and companion is not None:
        weight = weight + companion.float()
    m.add_(gradient - m, alpha=-math.expm1(options["log_beta1"]))
    v.add_(gradient.square() - v, alpha=-math.expm1(options["log_beta2"]))
    rate = options["learning_rate"]
    root = (v.sqrt() / math.sqrt(-math.expm1(step * options["log_beta2"]))).add_(options["eps"])
    change = m.div(root).mul_(rate / -math.expm1(step * options["log_beta1"]))
    weight = weight * (1 - rate * options["decay"]) - change
    if rounding == "stochastic":
        weight = stochastic(weight, int(options["before"]), int(options["seed"]), int(step))
    weights.copy_(weight)
    if companion is not None:
        companion.copy_(weight if rounding == "master" else weight - weights.float())


def stochastic(weight: torch.Tensor, before: int, seed: int, step: int) -> torch.Tensor:
    """Round to bfloat16, kept in fp32, up or down so that the mean is unbiased (arXiv 2010.06192). The noise depends
    only on parameter, step and position: it needs no state, and a resumed run draws the same."""
    key = mixed((mixed(seed) + step) & LOW_BITS)
    noise = mixed((torch.arange(before, before + len(weight)) & LOW_BITS) ^ key) & 0xFFFF
    return rounded(weight, noise.int())


def rounded(weight: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Add `noise`, int32, to the lower half of the bits, and keep the upper half; NaN would overflow, and stays."""
    bits = weight.view(torch.int32).add(noise).bitwise_and_(-65536)
    return torch.where(weight.isnan(), weight, bits.view(torch.float32))


def mixed(x: Number) -> Number:
    """Hash to 32 pseudorandom bits, as the kernel does."""
    x = (x ^ (x >> 16)) * 0x7FEB352D & LOW_BITS
    x = (x ^ (x >> 15)) * 0x846CA68B & LOW_BITS
    return x ^ (x >> 16)
