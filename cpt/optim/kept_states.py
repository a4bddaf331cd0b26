"""Optimizers whose states are of another type than their parameters: fp32 or 8 bit beside bfloat16."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from cpt.errors import CheckpointError


class KeptStates(torch.optim.Optimizer):
    """An optimizer that loads its states as they were saved; torch's would round them to the type of the parameters.

    A step takes `found_inf` into account, a flag on the device as gradient scalers and the loss guard set it: where it is 1,
    nothing changes, and nobody waits to learn that.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self._step_supports_amp_scaling = True  # torch's and accelerate's name for taking `found_inf`

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            if learning:
                self.update(learning, group)
        return loss

    def update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Change parameters and their states."""
        raise NotImplementedError

    def names(self, parameter: torch.Tensor, group: dict[str, Any]) -> set[str]:
        """What is kept for a parameter."""
        raise NotImplementedError

    def placed(self, parameter: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """A state that was saved, where it belongs."""
        return state.to(parameter.device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what was saved.

        Raises:
            CheckpointError: another kind of optimizer saved it.
        """
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        mine = ((parameter, group) for group in self.param_groups for parameter in group["params"])
        by_number = dict(zip(saved, mine, strict=True))
        for number, kept in state_dict["state"].items():
            parameter, group = by_number[number]
            if kept.keys() != (names := self.names(parameter, group)):
                raise CheckpointError(
                    f"`optimizer`: the checkpoint keeps {', '.join(sorted(kept))} for a parameter, and {type(self).__name__} keeps "
                    f"{', '.join(sorted(names))}. Write name, rounding and `model.dtype` as they were, or start anew with --new."
                )
            self.state[parameter] = {
                name: self.placed(parameter, value) if isinstance(value, torch.Tensor) else value for name, value in kept.items()
            }
