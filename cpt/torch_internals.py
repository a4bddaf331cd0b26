"""Every private name of torch that cpt uses, each with its reason; `USED` is the contract that a test checks.

Read in torch 2.11 and 2.13.
"""

from collections.abc import Sequence

import torch

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "torch._foreach_norm": ("self, ord, dtype", "norms of all gradients in a few kernels", "a public foreach norm"),
    "torch._foreach_mul_": ("self, tensor", "scale all gradients in a few kernels", "a public foreach product"),
}


def foreach_norm(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in fp32."""
    return list(torch._foreach_norm(tuple(tensors), 2.0, dtype=torch.float32))


def foreach_multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(tuple(tensors), factor)
