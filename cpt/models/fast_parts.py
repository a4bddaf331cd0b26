"""Does the fast way of a model (fused loss, compiled layers, attention kernels) compute what torch's plain operations
do? One row is computed both ways: its loss, and the gradient of some weights."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from accelerate.utils import extract_model_from_parallel
from accelerate.utils.memory import should_reduce_batch_size
from peft import PeftModel
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cpt.errors import CptError
from cpt.models.attention import plain_attention
from cpt.models.fused_loss import installed_loss, whole_logits
from cpt.models.layers import compiled_modules, decoder_layers, uncompiled_layers

LOSS, COMPILING, ATTENTION = "model.fused_loss", "training.torch_compile", "model.attention"
"""Each part is named by its key in a recipe."""
MOST_OF_ERROR = 300  # characters
Row = Mapping[str, Any]
Gradients = Literal["returned", "accumulated", "none"]


@dataclass(frozen=True)
class Tolerance:
    """The largest difference that rounding explains."""

    loss: float
    """Nats per token, relative to losses above 1."""
    gradient: float
    """Norm of the difference, relative to the norm of the plain gradient."""


# Without an error, ten families of 6 to 24 layers differ by up to 5e-5 (loss) and 0.03 (gradient) in bfloat16, 2e-7 and
# 3e-6 in float32. Planted errors change the gradient more: attention across documents by 0.5, a part's own gradient
# times 1.25 by 0.25, MLPs times 1.1 by 0.18.
HALF, SINGLE = Tolerance(loss=2e-3, gradient=0.1), Tolerance(loss=1e-4, gradient=1e-3)


@dataclass(frozen=True)
class PartDifference:
    """How far the results with a fast part are from the plain ones; infinitely, if they are not finite."""

    key: str
    loss: float = 0.0
    gradient: float = 0.0
    error: str = ""
    """The exception of the fast part."""

    def exceeds(self, tolerance: Tolerance) -> bool:
        return bool(self.error) or self.loss > tolerance.loss or self.gradient > tolerance.gradient

    def __str__(self) -> str:
        if self.error:
            return f"it failed: {self.error}"
        return f"its loss differs by {self.loss:.2g} and its gradient by {self.gradient:.2g} from plain operations"


def compare_fast_parts(
    model: nn.Module,
    row: Row,
    tolerance: Tolerance,
    *,
    gradients: Gradients = "returned",
    everywhere: Callable[[PartDifference], PartDifference] = lambda difference: difference,
) -> list[PartDifference]:
    """Compute the row plainly and as in training; return the fast parts that differ by more than the tolerance.

    The model is used in training mode without dropout, and is unchanged afterwards, as are random states.

    Args:
        row: arguments of the model with `labels`, one row on its device.
        gradients: how to compute them: `returned` by `torch.autograd.grad`; `accumulated` in the weights and then
            removed, for FSDP2; or `none`, for ZeRO-3, where only losses are compared.
        everywhere: called with each difference; returns the largest of all processes, for models that they share.
    """
    parts = fast_parts(model)
    with passes_without_dropout(model):
        expected = run_row(model, row, gradients, off=parts.values())

        def differ(key: str, off: Collection[Callable[[], AbstractContextManager[None]]]) -> PartDifference:
            try:
                return everywhere(difference(key, run_row(model, row, gradients, off=off), expected))
            except CptError:
                raise
            except Exception as problem:  # of a compiler or kernel
                if isinstance(problem, torch.OutOfMemoryError) or should_reduce_batch_size(problem):
                    raise
                message = " ".join(str(problem).split())
                error = f"{type(problem).__name__}: {message[:MOST_OF_ERROR]}"
            return everywhere(PartDifference(key, math.inf, math.inf, error))

        together = differ("", ())
        if not together.exceeds(tolerance):
            return []
        differing = []
        for key in parts:
            alone = differ(key, [switch for name, switch in parts.items() if name != key])
            if alone.exceeds(tolerance):
                differing.append(alone)
    # If parts only differ in combination, none of them is trusted.
    return differing or [PartDifference(key, together.loss, together.gradient, together.error) for key in parts]


def fast_parts(model: nn.Module) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """Return for each fast part, by its key, a context that replaces it by plain operations."""
    inner: Any = extract_model_from_parallel(model)
    whole = inner.get_base_model() if isinstance(inner, PeftModel) else inner
    parts: dict[str, Callable[[], AbstractContextManager[None]]] = {}
    if installed_loss(whole) is not None:
        parts[LOSS] = partial(whole_logits, whole)
    if compiled_modules(whole):
        parts[COMPILING] = partial(uncompiled_layers, whole)
    if isinstance(whole, PreTrainedModel):
        parts[ATTENTION] = partial(plain_attention, whole)
    return parts


@dataclass(frozen=True)
class RowResult:
    loss: float
    gradients: list[list[torch.Tensor]]
    """Of groups of weights, which are compared one by one."""


def run_row(
    model: nn.Module,
    row: Row,
    gradients: Gradients = "returned",
    *,
    off: Collection[Callable[[], AbstractContextManager[None]]] = (),
) -> RowResult:
    """Compute one forward and backward pass; `off` are contexts of the parts to switch off."""
    groups = compared_weights(model)
    weights = [weight for group in groups for weight in group]
    with ExitStack() as stack:
        for switch in off:
            stack.enter_context(switch())
        device = row["input_ids"].device
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        torch.manual_seed(0)  # routers may add noise
        if gradients == "none":
            stack.enter_context(torch.no_grad())
        loss = model(**row).loss
        summed = loss * row["labels"].numel()  # a mean's gradient would underflow in float16
        made: list[torch.Tensor | None] = [None] * len(weights)
        if gradients == "returned":
            made = list(torch.autograd.grad(summed, weights, allow_unused=True))
        elif gradients == "accumulated":
            summed.backward()
            made = [weight.grad for weight in weights]
            model.zero_grad(set_to_none=True)
    computed = iter(made)
    of_groups = []
    for group in groups:
        of_group = [next(computed) for _ in group]
        of_groups.append([gradient for gradient in of_group if gradient is not None])
    return RowResult(float(loss.detach()), of_groups)


def compared_weights(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return trained weights of the first decoder layer, whose gradient needs the backward pass of all layers, and the
    vectors outside of layers, such as the last norm; all trained weights if these have none."""
    layers = decoder_layers(model)
    in_layers = {weight for layer in layers for weight in layer.parameters()}
    first: list[nn.Parameter] = []
    for layer in layers:
        first = first or [weight for weight in layer.parameters() if weight.requires_grad]
    others = [weight for weight in model.parameters() if weight.requires_grad and weight not in in_layers]
    vectors = [weight for weight in others if weight.dim() == 1]
    groups = [group for group in (first, vectors) if group]
    return groups or [others]


def difference(key: str, result: RowResult, expected: RowResult) -> PartDifference:
    """Compare a result with the plain one; a plain result that is not finite says nothing about a part."""
    if not math.isfinite(expected.loss):
        return PartDifference(key)
    if not math.isfinite(result.loss):
        return PartDifference(key, math.inf, math.inf)
    of_loss = abs(result.loss - expected.loss) / max(1.0, abs(expected.loss))
    of_gradient = 0.0
    for group, plain in zip(result.gradients, expected.gradients, strict=True):
        if len(group) != len(plain):  # some weights have no gradient
            return PartDifference(key, of_loss, math.inf)
        distance = norm([gradient - other for gradient, other in zip(group, plain, strict=True)])
        size = norm(plain)
        if not math.isfinite(distance) or distance > 0 == size:
            return PartDifference(key, of_loss, math.inf)
        if distance > 0:
            of_gradient = max(of_gradient, distance / size)
    return PartDifference(key, of_loss, of_gradient)


def norm(tensors: list[torch.Tensor]) -> float:
    """The 2-norm of all numbers, also of those on other processes."""
    squares = 0.0
    for tensor in tensors:
        length = tensor.float().norm()
        if isinstance(length, DTensor):
            length = length.full_tensor()
        squares += float(length) ** 2
    return math.sqrt(squares)


@contextmanager
def passes_without_dropout(model: nn.Module) -> Iterator[None]:
    """Use the model in training mode, without dropout, which fast and plain kernels draw differently."""
    modes = {module: module.training for module in model.modules()}
    rates: list[tuple[nn.Module, str, float]] = []
    for module in modes:
        for name, value in vars(module).items():
            is_rate = "drop" in name or name == "p" and "Dropout" in type(module).__name__
            if is_rate and isinstance(value, float) and value > 0:
                rates.append((module, name, value))
    fused = installed_loss(model)
    losses = None if fused is None else fused.token_losses
    model.train()
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
        for module, mode in modes.items():
            module.training = mode
        if fused is not None:
            fused.token_losses, fused.hidden = losses, None
