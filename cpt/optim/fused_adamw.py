"""torch's fused AdamW without its preparations: which tensors a step changes is found out once, and not at each step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cpt.optim.groups import ParameterGroups


@dataclass(frozen=True)
class Prepared:
    """The tensors of a parameter group, in the kernel's order."""

    group: dict[str, Any]
    parameters: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]


class FusedAdamW(torch.optim.AdamW):
    """Bit for bit torch's, in state and result; its own step where gradients are missing or tensors lie on several devices."""

    def __init__(self, groups: ParameterGroups, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
        self.prepared: list[Prepared] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; `grad_scale` and `found_inf`, set from outside, divide the gradients and leave the update out on the device."""
        gradients = self.ready_gradients() if closure is None else None
        if gradients is None:
            result = super().step(closure)
            self.prepared = self.prepare()
            return result
        scale, skip = vars(self).get("grad_scale"), vars(self).get("found_inf")
        # The kernel changes nothing where it is to skip, so the number of steps may be set right before.
        steps = [step for part in self.prepared or () for step in part.steps]
        if skip is None:
            torch._foreach_add_(steps, 1)
        else:
            torch._foreach_add_(steps, [1 - skip] * len(steps))  # of a single tensor the host would ask the value
        for part, of_part in zip(self.prepared or (), gradients, strict=True):
            group = part.group
            torch._fused_adamw_(
                part.parameters,
                of_part,
                part.exp_avgs,
                part.exp_avg_sqs,
                [],
                part.steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
                grad_scale=scale,
                found_inf=skip,
            )
        return None

    def ready_gradients(self) -> list[list[torch.Tensor]] | None:
        """Of the prepared groups; None where one is missing, or nothing is prepared."""
        if self.prepared is None:
            return None
        gradients = [[parameter.grad for parameter in part.parameters] for part in self.prepared]
        whole = [[gradient for gradient in some if gradient is not None] for some in gradients]
        return whole if all(len(some) == len(found) for some, found in zip(gradients, whole, strict=True)) else None

    def prepare(self) -> list[Prepared] | None:
        """Once all states are there; None where a step is not one kernel's."""
        places = {(parameter.device, parameter.dtype) for group in self.param_groups for parameter in group["params"]}
        plain = all(type(parameter) is torch.nn.Parameter for group in self.param_groups for parameter in group["params"])
        if len(places) != 1 or not plain or any(group["amsgrad"] or group["maximize"] for group in self.param_groups):
            return None
        prepared = []
        for group in self.param_groups:
            states = [self.state[parameter] for parameter in group["params"] if parameter in self.state]
            if len(states) < len(group["params"]) or any("exp_avg" not in state for state in states):
                return None
            tensors = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
            prepared.append(Prepared(group, group["params"], *tensors))
        return prepared

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """With other tensors from now on."""
        self.prepared = None
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """With more tensors from now on."""
        self.prepared = None
        super().add_param_group(param_group)
