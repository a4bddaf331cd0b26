"""Does the fast way of a model (fused loss, compiled layers, attention kernels) compute what torch's plain operations
do? One row is computed both ways: its loss, and the gradient of some weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import extract_model_from_parallel
from accelerate.utils.memory import should_reduce_batch_size
from torch import nn
from torch.distributed.tensor import DTensor

from cpt.models.attention import plain_attention
from cpt.models.fused_loss import installed_loss, whole_logits, without_adapter
from cpt.models.layers import compiled_modules, decoder_layers, uncompiled_layers

LOSS = "model.fused_loss"
COMPILING = "training.torch_compile"
ATTENTION = "model.attention"
"""Each part is named by its key in a recipe."""
MOST_OF_ERROR = 300  # characters
Gradients = Literal["returned", "accumulated", "none"]
Switch = Callable[[], AbstractContextManager[None]]
"""A context in which a fast part is replaced by plain operations."""


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that rounding explains."""

    loss: float
    """Nats per token, relative to the plain loss."""
    gradient: float
    """Norm of the difference, relative to the norm of the plain gradient."""


# Without an error, nine families of 6 to 24 layers differ by up to 5e-5 (loss) and 0.03 (gradient) in bfloat16, and by
# 2e-7 and 3e-6 in float32. Planted errors change the gradient more: attention across documents by 0.3 to 1.3, one
# part's gradient times 1.25 by 0.25, MLPs times 1.1 by 0.18.
HALF = Tolerance(loss=2e-3, gradient=0.1)
SINGLE = Tolerance(loss=1e-4, gradient=1e-3)
# Rounding may send a token to another expert: MiniMind's experts differ by 0.25 without an error.
HALF_WITH_EXPERTS = Tolerance(loss=2e-3, gradient=0.5)


@dataclass(frozen=True)
class PartDifference:
    """How far the results with a fast part are from the plain ones; infinitely, if they are not finite."""

    key: str
    loss: float = 0.0
    gradient: float = 0.0
    error: str = ""
    """The exception of the fast part."""

    def exceeds(self, tolerance: Tolerance) -> bool:
        return self.loss > tolerance.loss or self.gradient > tolerance.gradient

    def __str__(self) -> str:
        if self.error:
            return self.error
        return f"its loss differs by {self.loss:.2g} and its gradient by {self.gradient:.2g} from plain operations"


def compare_fast_parts(
    model: nn.Module,
    row: Mapping[str, Any],
    tolerance: Tolerance,
    *,
    gradients: Gradients = "returned",
    everywhere: Callable[[PartDifference], PartDifference] = lambda difference: difference,
) -> list[PartDifference]:
    """Compute the row plainly and as in training; return the fast parts that differ by more than the tolerance.

    The model is used in training mode without dropout, and has no gradients afterwards. Random states do not change.

    Args:
        row: arguments of the model with `labels`, one row on its device.
        gradients: how to compute them: `returned` by `torch.autograd.grad`; `accumulated` in the weights and then
            removed, for FSDP2; or `none`, for ZeRO-3, where only losses are compared.
        everywhere: called with each difference; returns the largest of all processes.
    """
    parts = fast_parts(model)
    with passes_without_dropout(model):
        expected = run_row(model, row, gradients, off=parts.values())

        def compare(key: str, off: Iterable[Switch]) -> PartDifference:
            try:
                difference = difference_from(expected, run_row(model, row, gradients, off=off), key)
            except RuntimeError as problem:  # of a compiler or kernel
                if should_reduce_batch_size(problem):
                    raise
                message = " ".join(str(problem).split())[:MOST_OF_ERROR]
                difference = PartDifference(key, math.inf, math.inf, f"it fails: {message}")
            return everywhere(difference)

        if not compare("together", ()).exceeds(tolerance):
            return []
        differences = []
        for key in parts:
            other_switches = [switch for name, switch in parts.items() if name != key]
            differences.append(compare(key, other_switches))
    exceeding = [difference for difference in differences if difference.exceeds(tolerance)]
    # If parts only differ in combination, none of them is trusted.
    return exceeding or differences


def fast_parts(model: nn.Module) -> dict[str, Switch]:
    """Return a switch for each fast part of the model, by its key."""
    base = without_adapter(extract_model_from_parallel(model))
    parts: dict[str, Switch] = {ATTENTION: partial(plain_attention, base)}
    if installed_loss(base) is not None:
        parts[LOSS] = partial(whole_logits, base)
    if compiled_modules(base):
        parts[COMPILING] = partial(uncompiled_layers, base)
    return parts


@dataclass(frozen=True)
class RowResult:
    loss: float
    gradients: list[torch.Tensor | None]
    """Of `compared_weights`; None for a weight that the pass did not use."""


def run_row(
    model: nn.Module,
    row: Mapping[str, Any],
    gradients: Gradients = "returned",
    *,
    off: Iterable[Switch] = (),
) -> RowResult:
    """Compute one forward and backward pass with some parts switched off."""
    weights = compared_weights(model)
    device = row["input_ids"].device
    with ExitStack() as stack:
        for switch in off:
            stack.enter_context(switch())
        random_devices = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(random_devices))
        torch.manual_seed(0)  # routers may add noise
        if gradients == "none":
            stack.enter_context(torch.no_grad())
        loss = model(**row).loss
        summed = loss * row["labels"].numel()  # a mean's gradient would underflow in float16
        computed: list[torch.Tensor | None] = []
        if gradients == "returned":
            computed = list(torch.autograd.grad(summed, weights, allow_unused=True))
        elif gradients == "accumulated":
            summed.backward()
            computed = [weight.grad for weight in weights]
            model.zero_grad()
    return RowResult(float(loss.detach()), computed)


def compared_weights(model: nn.Module) -> list[nn.Parameter]:
    """Return trained weights of the first decoder layer, whose gradient needs the backward pass of all layers, and
    trained vectors, such as the last norm; all trained weights if there are none."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for layer in decoder_layers(model):
        in_layer = {weight for weight in layer.parameters() if weight.requires_grad}
        if in_layer:
            return [weight for weight in trained if weight in in_layer or weight.dim() == 1]
    return trained


def difference_from(expected: RowResult, result: RowResult, key: str) -> PartDifference:
    """Compare with the plain result; one that is not finite says nothing about a part."""
    if not math.isfinite(expected.loss):
        return PartDifference(key)
    squared_distance = 0.0
    squared_size = 0.0
    for gradient, plain in zip(result.gradients, expected.gradients, strict=True):
        if plain is None:
            continue
        if gradient is None and plain.dim() == 1:  # a norm that is not trained
            return PartDifference(key, gradient=math.inf)
        distance = plain if gradient is None else gradient - plain
        squared_distance += squared_norm(distance)
        squared_size += squared_norm(plain)
    loss_difference = abs(result.loss - expected.loss) / (abs(expected.loss) or 1.0)
    gradient_difference = math.sqrt(squared_distance / (squared_size or 1.0))
    if not math.isfinite(loss_difference + gradient_difference):
        return PartDifference(key, math.inf, math.inf)
    return PartDifference(key, loss_difference, gradient_difference)


def squared_norm(tensor: torch.Tensor) -> float:
    square = tensor.float().square().sum()
    if isinstance(square, DTensor):
        square = square.full_tensor()
    return float(square)


@contextmanager
def passes_without_dropout(model: nn.Module) -> Iterator[None]:
    """Use the model in training mode, without dropout, which fast and plain kernels draw differently."""
    was_training = model.training
    rates: list[tuple[nn.Module, str, float]] = []
    for module in model.modules():
        for name, value in vars(module).items():
            is_rate = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
            if is_rate and isinstance(value, float):
                rates.append((module, name, value))
    model.train()
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
        model.train(was_training)
        fused = installed_loss(model)
        if fused is not None:
            # Buffers of the passes would stay in memory.
            fused.hidden = None
            fused.token_losses = None
            fused.memory.take()
