"""AdamW with its states in host memory: DeepSpeed's CPU kernel, made to resume bit for bit.

The kernel keeps beta^t as a running product and multiplies it at each step, but computes it anew with pow() in the
first step after a load. The two differ in the last bit, so a resumed run drifts from the straight one. Playing the
steps again on a dummy parameter of one element brings the product back exactly, and keeps the fast kernel.
"""

from collections.abc import Sequence
from typing import Any

import torch

from cpt.errors import ResourceError
from cpt.hardware import announce_compiling
from cpt.ranks import is_main_process


def offloaded_adamw(
    groups: list[dict[str, Any]],
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) by DeepSpeed's kernel for the host's processor."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # needs a compiler, so only runs that offload pay for it

    if is_main_process():
        announce_compiling("cpu_adam", "DeepSpeed compiles its optimizer for the host")

    try:
        return DeepSpeedCPUAdam(  # type: ignore[no-any-return]
            groups, lr=learning_rate, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, adamw_mode=True
        )
    except RuntimeError as problem:
        raise ResourceError(
            f"DeepSpeed's CPU AdamW could not be compiled: {problem.__cause__ or problem}. Install a C++ compiler:"
            " apt-get install g++"
        ) from problem


def replay_step_counter(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Bring the kernel's running products of beta to what they were after `steps` steps without an interruption.

    Args:
        optimizer: a DeepSpeedCPUAdam whose states were just loaded; any other optimizer is left alone.
        steps: steps that the loaded states had made.
    """
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    if not isinstance(optimizer, DeepSpeedCPUAdam):
        return
    group = optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    weight, gradient, moment, square = (torch.zeros(1) for _ in range(4))
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(
            optimizer.opt_id,
            step,
            group["lr"],
            beta1,
            beta2,
            group["eps"],
            0.0,
            True,
            weight,
            gradient,
            moment,
            square,
        )
