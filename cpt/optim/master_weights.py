"""AdamW over weights in half precision, with a master copy of them in fp32.

A bfloat16 weight has 8 bits of precision: an update of less than a 512th of it is lost. At the learning rates of continued
pre-training most are, so weights learn in fp32 and the model computes with their rounded copies (arXiv 1710.03740).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from cpt.optim.kept_states import KeptStates

AT_ONCE = 2**26
"""Numbers whose gradients are held in fp32 at the same time; a larger parameter's are held by themselves."""


class AdamWWithMaster(KeptStates):
    """Moments and weights in fp32, by torch's fused kernel; parameters that are fp32 already are their own master."""

    def __init__(self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update the masters, and round them."""
        for some in in_parts(parameters):
            states = [self.state_of(parameter) for parameter in some]
            masters = [state.get("master", parameter) for state, parameter in zip(states, some, strict=True)]
            fused_adamw(
                masters,
                [parameter.grad.float() for parameter in some if parameter.grad is not None],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                group,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
            )
            rounded = [(parameter, master) for parameter, master in zip(some, masters, strict=True) if master is not parameter]
            if rounded:
                torch._foreach_copy_([parameter for parameter, _ in rounded], [master for _, master in rounded])

    def names(self, parameter: torch.Tensor, group: dict[str, Any]) -> set[str]:
        """A master only beside half precision."""
        return {"step", "exp_avg", "exp_avg_sq"} | ({"master"} if parameter.dtype != torch.float32 else set())

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Made at its first update."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.float32)
            if parameter.dtype != torch.float32:
                state["master"] = parameter.detach().to(torch.float32, copy=True)
        return state


def in_parts(parameters: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """As many parameters as make AT_ONCE numbers, and at least one."""
    part: list[torch.Tensor] = []
    numbers = 0
    for parameter in parameters:
        if part and numbers + parameter.numel() > AT_ONCE:
            yield part
            part, numbers = [], 0
        part.append(parameter)
        numbers += parameter.numel()
    if part:
        yield part


def fused_adamw(
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avgs: list[torch.Tensor],
    exp_avg_sqs: list[torch.Tensor],
    steps: list[torch.Tensor],
    group: dict[str, Any],
    *,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
) -> None:
    """torch's fused kernel over fp32, with the options of a parameter group."""
    torch_adamw(
        weights,
        gradients,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
