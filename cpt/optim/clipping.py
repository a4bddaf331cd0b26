"""The norm of gradients in half precision, taken in fp32: torch's own has the gradients' type, and 3 digits of it."""

from collections.abc import Sequence

import torch


def gradient_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of all together, in fp32; 0 where there are none."""
    if not gradients:
        return torch.zeros(())
    norms = torch._foreach_norm(tuple(gradients), 2.0, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms))


def clip_gradients(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Scale them down in place where their norm is larger; the host does not wait to learn it.

    Returns:
        The norm before.
    """
    norm = gradient_norm(gradients)
    torch._foreach_mul_(tuple(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
