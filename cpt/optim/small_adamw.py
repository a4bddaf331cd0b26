"""AdamW with few bytes for each weight: moments in 8 bit, weights in bfloat16 without a master copy, states on the host if asked.

A parameter is updated in pieces, each in fp32 for the moment: what stands in memory is small, and blocks of 8-bit states are
independent of each other, so that the pieces do not change the result.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from cpt.errors import RecipeError
from cpt.optim.groups import IS_EMBEDDING
from cpt.optim.kept_states import KeptStates
from cpt.optim.master_weights import fused_adamw
from cpt.optim.quantized_moments import BLOCK, code_of_zero, dequantize, quantize
from cpt.optim.rounding import Rounding, chance, split, stochastic

PIECE = 2**24
"""Numbers that are updated at once, a multiple of BLOCK."""
FEWEST_IN_8_BIT = 4096
"""Smaller parameters keep fp32 moments, as bitsandbytes' do: there is nothing to save."""
FEWEST_ON_HOST = 100_000
MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))
"""Their names, and whether they have a sign."""
OF_ROUNDING: dict[str, set[str]] = {"kahan": {"compensation"}, "stochastic": {"draws"}}


class SmallAdamW(KeptStates):
    """AdamW by torch's fused kernel, over pieces of parameters.

    Args:
        eight_bit: moments in blocks of 8-bit numbers (arXiv 2110.02861), but for embeddings and small parameters.
        paged: states of large parameters lie in pinned memory of the host, and come to the GPU a piece at a time.
        rounding: of bfloat16 weights.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        eight_bit: bool,
        paged: bool,
        rounding: Rounding,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if any(parameter.dtype == torch.float16 for group in self.param_groups for parameter in group["params"]):
            raise RecipeError(
                "`optimizer`: states in 8 bit and `rounding` are for bfloat16 or fp32 weights. Write `model.dtype: bfloat16`."
            )
        self.eight_bit, self.paged, self.rounding = eight_bit, paged, rounding
        trained = (parameter for group in self.param_groups for parameter in group["params"])
        self.numbers = {parameter: number for number, parameter in enumerate(trained)}

    def update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """One after the other."""
        for parameter in parameters:
            self.update_one(parameter, group)

    def update_one(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        """All of its pieces take the same step."""
        assert parameter.grad is not None, "only those with a gradient are updated"
        state = self.state_of(parameter, group)
        generator = None
        if "draws" in state:
            generator = chance(self.numbers[parameter], state["draws"], parameter.device)
            state["draws"] += 1
        weights, gradients, step = parameter.detach().view(-1), parameter.grad.reshape(-1), state["step"]
        stepped = step
        for start, end in pieces(parameter.numel()):
            stepped = step.clone()
            self.update_piece(weights[start:end], gradients[start:end], cut(state, start, end), stepped, group, generator)
        step.copy_(stepped)

    def update_piece(
        self,
        weights: torch.Tensor,
        gradients: torch.Tensor,
        kept: dict[str, torch.Tensor],
        step: torch.Tensor,
        group: dict[str, Any],
        generator: torch.Generator | None,
    ) -> None:
        """Bring the states here, step in fp32, and keep what came of it."""
        here = {name: tensor.to(weights.device, non_blocking=True) for name, tensor in kept.items()}
        moments = [moment_of(here, name, signed) for name, signed in MOMENTS]
        full = weights if weights.dtype == torch.float32 else weights.float()
        if "compensation" in here:
            full += here["compensation"]
        fused_adamw(
            [full], [gradients.float()], moments[:1], moments[1:], [step], group, grad_scale=self.grad_scale, found_inf=self.found_inf
        )
        changed: dict[str, torch.Tensor] = {}
        for (name, signed), moment in zip(MOMENTS, moments, strict=True):
            changed |= named_codes(name, quantize(moment, signed)) if f"{name}_scale" in here else {name: moment}
        if "compensation" in here:
            rounded, changed["compensation"] = split(full)
            self.keep(weights, weights, rounded)
        elif full is not weights:
            weights.copy_(full if generator is None else stochastic(full, generator))  # both leave what did not change
        for name, value in changed.items():
            if value is not kept[name]:
                self.keep(kept[name], here[name], value)

    def keep(self, place: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """Write a result, unless the step is left out: rounding twice is not rounding once."""
        if self.found_inf is not None:
            after = torch.where(self.found_inf.to(after.device) > 0, before, after)
        place.copy_(after, non_blocking=True)

    # --- states -------------------------------------------------------------------------------------------------------------------------

    def names(self, parameter: torch.Tensor, group: dict[str, Any]) -> set[str]:
        """Moments, with scales where they are in 8 bit, and what rounding needs."""
        in_8_bit = self.eight_bit and not group.get(IS_EMBEDDING, False) and parameter.numel() >= FEWEST_IN_8_BIT
        of_rounding = OF_ROUNDING.get(self.rounding, set()) if parameter.dtype == torch.bfloat16 else set()
        return {"step"} | {name for name, _ in MOMENTS} | ({f"{name}_scale" for name, _ in MOMENTS} if in_8_bit else set()) | of_rounding

    def state_of(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """Made at its first update."""
        state: dict[str, Any] = self.state[parameter]
        if state:
            return state
        numbers, names = parameter.numel(), self.names(parameter, group)
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for name, signed in MOMENTS:
            if f"{name}_scale" in names:
                state[name] = self.filled(parameter, numbers, torch.uint8, code_of_zero(signed))
                state[f"{name}_scale"] = self.filled(parameter, -(-numbers // BLOCK), torch.float32)
            else:
                state[name] = self.filled(parameter, numbers, torch.float32)
        if "compensation" in names:
            state["compensation"] = self.filled(parameter, numbers, torch.bfloat16)
        if "draws" in names:
            state["draws"] = 0
        return state

    def is_on_host(self, parameter: torch.Tensor) -> bool:
        """Whether the states of a parameter are."""
        return self.paged and parameter.numel() >= FEWEST_ON_HOST

    def filled(self, parameter: torch.Tensor, size: int, dtype: torch.dtype, value: int = 0) -> torch.Tensor:
        """A new state."""
        on_host = self.is_on_host(parameter)
        device = torch.device("cpu") if on_host else parameter.device
        return torch.full((size,), value, dtype=dtype, device=device, pin_memory=on_host and parameter.is_cuda)

    def placed(self, parameter: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """A state that was saved, on the host or beside its parameter; the counter of steps always there."""
        if state.dim() == 0 or not self.is_on_host(parameter):
            return state.to(parameter.device)
        return state.cpu().pin_memory() if parameter.is_cuda else state.cpu()

    def state_dict(self) -> dict[str, Any]:
        """What is saved, after what is on its way to the host has arrived."""
        if self.paged and torch.cuda.is_available():
            torch.cuda.synchronize()
        return super().state_dict()


def pieces(numbers: int) -> Iterator[tuple[int, int]]:
    """First and end of each piece."""
    return pairwise([*range(0, numbers, PIECE), numbers])


def cut(state: dict[str, Any], start: int, end: int) -> dict[str, torch.Tensor]:
    """The states of a piece; of 8-bit moments there is a scale for each block."""
    found = {}
    for name, value in state.items():
        if name.endswith("_scale"):
            found[name] = value[start // BLOCK : -(-end // BLOCK)]
        elif name not in ("step", "draws"):
            found[name] = value[start:end]
    return found


def moment_of(state: dict[str, torch.Tensor], name: str, signed: bool) -> torch.Tensor:
    """In fp32."""
    scale = state.get(f"{name}_scale")
    return state[name] if scale is None else dequantize(state[name], scale, signed)


def named_codes(name: str, codes: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A quantized moment as its two states."""
    return {name: codes[0], f"{name}_scale": codes[1]}
