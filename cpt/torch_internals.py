"""Every private name of torch that cpt uses, each with its reason; `USED` is the contract that a test checks.

Read in torch 2.11 and 2.13.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

USED = {  # dotted name -> its parameters ("" for what is not called), why, what ends it
    "torch._foreach_norm": ("self, ord, dtype", "norms of all gradients in a few kernels", "a public foreach norm"),
    "torch._foreach_mul_": ("self, tensor", "scale all gradients in a few kernels", "a public foreach product"),
    "torch._foreach_div_": ("self, scalar", "average all gradients in a few kernels", "a public foreach division"),
    "torch.distributed.distributed_c10d._world": ("", "all process groups, those of libraries too", "a public list"),
    "torch.distributed.distributed_c10d._set_pg_timeout": (
        "timeout, group",
        "`training.ddp_timeout` for groups that exist; DeepSpeed's wait 10 or 30 minutes whatever the recipe says",
        "a public way to change it",
    ),
    "torch.optim.Adam._step_supports_amp_scaling": ("", "skip an update without a wait", "a public attribute"),
}


def foreach_norm(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The 2-norm of each tensor, in fp32."""
    return list(torch._foreach_norm(tuple(tensors), 2.0, dtype=torch.float32))


def foreach_multiply(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    torch._foreach_mul_(tuple(tensors), factor)


def foreach_divide(tensors: Sequence[torch.Tensor], number: float) -> None:
    torch._foreach_div_(tuple(tensors), number)


def set_group_timeouts(timeout: timedelta) -> None:
    """Let collectives of every process group wait so long."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timeout, group)


def reads_scale(optimizer: torch.optim.Optimizer) -> bool:
    """True where the optimizer's kernel reads `grad_scale` and `found_inf` from the device."""
    return bool(vars(optimizer).get("_step_supports_amp_scaling", False))
