"""The norm of gradients in fp32, whole or in parts on several processes: torch's own has the gradients' type, and 3
digits of it."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from cpt.torch_internals import foreach_multiply, foreach_norm


def gradient_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all together, in fp32; 0 where there are none. Of what lies in parts on several processes, every one of them
    must call it."""
    if not gradients:
        return torch.zeros(())
    norm = torch.linalg.vector_norm(torch.stack(foreach_norm(parts_here(gradients))))
    first = gradients[0]
    if not isinstance(first, DTensor):
        return norm
    squared = norm.square()
    dist.all_reduce(squared, group=first.device_mesh.get_group())
    return squared.sqrt()


def clip_gradients(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale them down in place where their norm is larger; the host does not wait to learn it.

    Returns:
        The norm before.
    """
    norm = gradient_norm(gradients)
    foreach_multiply(parts_here(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def parts_here(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
