"""AdamW with one kernel for each parameter: an fp32 master copy, or few bytes for each weight, with states on the host
if asked."""

from collections.abc import Callable
from itertools import chain
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from cpt.errors import CheckpointError, RecipeError
from cpt.optim.adamw_update import BLOCK, DECADES, adamw_update
from cpt.optim.groups import IS_EMBEDDING
from cpt.optim.paged_states import Arena, Pages, aligned

Rounding = Literal["kahan", "stochastic"]
FEWEST_IN_8_BIT = 4096
"""Smaller parameters keep fp32 moments, as bitsandbytes' do: there is nothing to save."""
FEWEST_ON_HOST = 100_000


class OneKernelAdamW(torch.optim.Optimizer):
    """AdamW over bfloat16 weights with states in fp32 or 8 bit.

    A step takes `found_inf` into account, a flag on the device as gradient scalers and the loss guard set it: where it
    is 1, nothing changes, and the host does not wait to learn it. `grad_scale` divides the gradients.

    Args:
        rounding: of bfloat16 weights; None keeps fp32 master copies of weights in half precision.
        eight_bit: moments in 8 bit (arXiv 2110.02861), but for embeddings and small parameters.
        paged: states of large parameters are in pinned memory of the host.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        rounding: Rounding | None = None,
        eight_bit: bool = False,
        paged: bool = False,
    ) -> None:
        self.rounding, self.eight_bit, self.paged = rounding, eight_bit, paged
        self.layouts: dict[torch.Tensor, dict[str, torch.dtype]] = {}
        """Names and types of each parameter's states, without its step."""
        self.pages: Pages | None = None
        self.arena: Arena | None = None
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
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
            states = [self.state_of(parameter) for parameter in learning]
            if states:
                # A kernel that skips changes nothing, so the steps may be counted before.
                counted = (
                    1 if self.found_inf is None else [1 - self.found_inf.to(states[0]["step"].device)] * len(states)
                )
                torch._foreach_add_([state["step"] for state in states], counted)
            for parameter, state in zip(learning, states, strict=True):
                self.update(parameter, state, group)
        return loss

    def update(self, parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]) -> None:
        """Launch the kernel, or one for each piece where the states are on the host."""
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        weights, gradients = flat(parameter), flat(parameter.grad)
        arrays = {name: flat(value) for name, value in state.items() if name != "step"}

        def launch(
            weights: torch.Tensor, gradients: torch.Tensor, arrays: dict[str, torch.Tensor], before: int = 0
        ) -> None:
            adamw_update(
                weights,
                gradients,
                arrays["exp_avg"],
                arrays["exp_avg_sq"],
                arrays.get("exp_avg_scale"),
                arrays.get("exp_avg_sq_scale"),
                arrays.get("master", arrays.get("compensation")),
                state["step"],
                self.grad_scale,
                self.found_inf,
                (
                    "master"
                    if "master" in arrays
                    else self.rounding
                    if parameter.dtype == torch.bfloat16 and self.rounding
                    else "nearest"
                ),
                before,
                self.numbers[parameter],
                group["lr"],
                group["weight_decay"],
                *group["betas"],
                group["eps"],
            )

        if self.pages is None and parameter.is_cuda and self.is_on_host(parameter):
            self.pages = Pages(parameter.device)
        if self.pages is None or not self.is_on_host(parameter):
            launch(weights, gradients, arrays)
            return
        for first, last, here in self.pages.pieces(self.numbers[parameter], arrays):
            launch(weights[first:last], gradients[first:last], here, first)

    @property
    def has_master(self) -> bool:
        return any("master" in layout for layout in self.layouts.values())

    # --- states ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, which also calls it for each of the first groups."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        self.layouts |= {parameter: self.layout(parameter, group) for parameter in group["params"]}
        self.numbers = {parameter: number for number, parameter in enumerate(self.layouts)}

    def layout(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.dtype]:
        """Names and types of a parameter's states."""
        if parameter.dtype == torch.float16 and self.rounding is not None:
            raise RecipeError(
                "`optimizer`: states in 8 bit and `rounding` are for bfloat16 or fp32 weights. Write `model.dtype:"
                " bfloat16`."
            )
        in_8_bit = self.eight_bit and not group.get(IS_EMBEDDING, False) and parameter.numel() >= FEWEST_IN_8_BIT
        found = dict.fromkeys(DECADES, torch.uint8 if in_8_bit else torch.float32)
        if in_8_bit:
            found |= {f"{name}_scale": torch.float32 for name in DECADES}
        if parameter.dtype != torch.float32 and self.rounding is None:
            found["master"] = torch.float32
        if parameter.dtype == torch.bfloat16 and self.rounding == "kahan":
            found["compensation"] = torch.bfloat16
        return found

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Made at its first update."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name, dtype in self.layouts[parameter].items():
                state[name] = self.zeros(parameter, name, dtype)
            if "master" in state:
                state["master"].copy_(parameter.detach())
        return state

    def zeros(self, parameter: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
        """A new state, of which each number is 0."""
        shape = self.shape_of(parameter, name)
        if self.is_on_host(parameter):
            if self.arena is None:
                self.arena = Arena(self.bytes_on_host(), parameter.device)
            return self.arena.zeros(shape, dtype)
        if name.endswith("_scale"):
            return torch.zeros(shape, dtype=dtype, device=parameter.device)
        return torch.zeros_like(parameter, dtype=dtype, memory_format=torch.contiguous_format)

    def shape_of(self, parameter: torch.Tensor, name: str) -> torch.Size:
        """A scale for each block; all else has a number for each weight."""
        return torch.Size([-(-parameter.numel() // BLOCK)]) if name.endswith("_scale") else parameter.shape

    def is_on_host(self, parameter: torch.Tensor) -> bool:
        return self.paged and parameter.numel() >= FEWEST_ON_HOST

    def bytes_on_host(self) -> int:
        return sum(
            aligned(self.shape_of(parameter, name).numel() * dtype.itemsize)
            for parameter, layout in self.layouts.items()
            if self.is_on_host(parameter)
            for name, dtype in layout.items()
        )

    def state_dict(self) -> dict[str, Any]:
        """Wait for copies to the host, then as torch's."""
        if self.pages is not None:
            self.pages.wait()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round states to the type of the parameters."""
        if self.pages is not None:
            self.pages.wait()
        self.pages = self.arena = None
        super().load_state_dict({**state_dict, "state": {}})
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        by_number = dict(zip(saved, chain.from_iterable(group["params"] for group in self.param_groups), strict=True))
        for number, kept in state_dict["state"].items():
            if kept.keys() != (names := {"step", *self.layouts[parameter := by_number[number]]}):
                raise CheckpointError(
                    f"`optimizer`: the checkpoint has {', '.join(sorted(kept))} for a parameter, and"
                    f" {type(self).__name__} needs {', '.join(sorted(names))}. Write name, rounding and `model.dtype`"
                    " as they were, or start anew with --new."
                )
            for name, value in self.state_of(parameter).items():
                value.copy_(kept[name])


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """In one dimension; of a DTensor the part of this process."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().view(-1)
