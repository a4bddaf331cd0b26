"""Gradients between the backward pass and the update: norm and clipping in fp32, and gradients that are released
early.

Released gradients never accumulate in memory: each parameter is updated in the backward pass, and its gradient is
freed immediately. A parameter is not updated if its gradient is not finite.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cpt.torch_internals import foreach_multiply, foreach_norm, reads_scale


class ReleasedGradients:
    """Hooks that let an optimizer update each parameter separately. States and checkpoints are the same as without."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer: Any = optimizer
        self.group_of: dict[torch.Tensor, int] = {}
        self.hooks = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self.group_of[parameter] = number
                hook = parameter.register_post_accumulate_grad_hook(self.step_one)
                self.hooks.append(hook)
        self.skip: torch.Tensor | None = None
        self.squares: torch.Tensor | None = None

    def begin(self, skip: torch.Tensor | None) -> None:
        """Prepare for a backward pass, whose updates are skipped if `skip`, on the device, is true."""
        self.skip = skip
        self.squares = None

    def step_one(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, "the hook runs after the gradient is computed"
        square = torch.linalg.vector_norm(parameter.grad, dtype=torch.float32).square()
        self.squares = square if self.squares is None else self.squares + square
        is_skipped = ~square.isfinite()
        if self.skip is not None:
            is_skipped = self.skip | is_skipped
        groups = self.optimizer.param_groups
        if reads_scale(self.optimizer):
            self.optimizer.found_inf = is_skipped.float()
        elif bool(
            is_skipped
        ):  # the host waits: this optimizer does not read a flag from the device
            parameter.grad = None
            return
        self.optimizer.param_groups = [{**groups[self.group_of[parameter]], "params": [parameter]}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
        parameter.grad = None

    def norm(self) -> torch.Tensor:
        if self.squares is None:
            return torch.zeros(())
        return self.squares.sqrt()

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        if reads_scale(self.optimizer):
            self.optimizer.found_inf = None


# --- norm and clipping -----------------------------------------------------------------------------------------------


def gradient_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all gradients, in fp32; 0 without any. torch's has the gradients' dtype, with only 3 digits.
    If gradients are sharded, all processes must call this."""
    if not gradients:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(local_parts(gradients))))
    first = gradients[0]
    if not isinstance(first, DTensor):
        return norm
    squared = norm.square()
    dist.all_reduce(squared, group=first.device_mesh.get_group())
    return squared.sqrt()


def clip_gradients(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip gradients in place, and return the norm before; the host does not wait."""
    norm = gradient_norm(gradients)
    foreach_multiply(local_parts(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def local_parts(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of sharded gradients that this process has, and other gradients as they are."""
    parts = []
    for gradient in gradients:
        parts.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return parts
