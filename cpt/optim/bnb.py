"""bitsandbytes' optimizers by transformers' names: states in 8 bits (arXiv 2110.02861), or paged to host memory."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, Literal

import torch
from torch import nn

from cpt.models.adapters import require_bitsandbytes
from cpt.optim.adamw import OneKernelAdamW, flat, load_groups, refuse_other_states
from cpt.optim.adamw_update import LOW_BITS, mixed, rounded
from cpt.optim.groups import IS_EMBEDDING, ParameterGroups

BLOCK = 256  # numbers of a state that share a scale
FEWEST_ON_HOST = 100_000  # states of smaller parameters are not paged
AT_ONCE = 2**22  # numbers whose fp32 copies exist at the same time while weights are rounded
QUANTIZED = "__bnb_optimizer_quant_state__"  # key of the states in a checkpoint


def bnb_adamw(
    groups: ParameterGroups,
    learning_rate: float,
    options_of_name: dict[str, Any],
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Literal["stochastic"] | None = "stochastic",
) -> torch.optim.Optimizer:
    """AdamW by bitsandbytes.

    Args:
        rounding: of bfloat16 weights; null rounds to nearest, as bitsandbytes alone.
    """
    options = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    return build_bnb(
        "AdamW", groups, learning_rate, rounding=rounding, **options, **options_of_name
    )


def bnb_ademamix(
    groups: ParameterGroups,
    learning_rate: float,
    options_of_name: dict[str, Any],
    *,
    betas: Sequence[float] = (0.9, 0.999, 0.9999),
    alpha: float = 5.0,
    t_alpha: int | None = None,
    t_beta3: int | None = None,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """AdEMAMix (arXiv 2409.03137) by bitsandbytes.

    Args:
        t_alpha: steps in which `alpha` grows to its value.
        t_beta3: steps in which the third beta grows to its value.
    """
    schedules = {"alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}
    options = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
    return build_bnb("AdEMAMix", groups, learning_rate, **schedules, **options, **options_of_name)


def bnb_lion(
    groups: ParameterGroups,
    learning_rate: float,
    options_of_name: dict[str, Any],
    *,
    betas: Sequence[float] = (0.9, 0.99),
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """Lion (arXiv 2302.06675) by bitsandbytes."""
    options = {"betas": tuple(betas), "weight_decay": weight_decay}
    return build_bnb("Lion", groups, learning_rate, **options, **options_of_name)


def bnb_rmsprop(
    groups: ParameterGroups,
    learning_rate: float,
    options_of_name: dict[str, Any],
    *,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """RMSprop by bitsandbytes.

    Args:
        alpha: decay of the squared gradients.
    """
    options = {"alpha": alpha, "eps": eps, "weight_decay": weight_decay}
    return build_bnb("RMSprop", groups, learning_rate, **options, **options_of_name)


def named(
    build: Callable[..., torch.optim.Optimizer], name: str
) -> Callable[..., torch.optim.Optimizer]:
    """Return `build` with the bits, and the pages, that transformers' name of an optimizer means."""
    options_of_name: dict[str, Any] = {"optim_bits": 8 if name.endswith("8bit") else 32}
    if name.startswith("paged"):
        options_of_name["is_paged"] = True

    @wraps(build)
    def build_named(
        groups: ParameterGroups, learning_rate: float, **options: Any
    ) -> torch.optim.Optimizer:
        return build(groups, learning_rate, options_of_name, **options)

    return build_named


def build_bnb(
    class_name: str, groups: ParameterGroups, learning_rate: float, **options: Any
) -> torch.optim.Optimizer:
    require_bitsandbytes("`optimizer.name`")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.optim  # an extra; seconds to import

    bases = (BitsAndBytesOptimizer, vars(bitsandbytes.optim)[class_name])
    optimizer: torch.optim.Optimizer = type(class_name, bases, {})(
        groups, lr=learning_rate, **options
    )
    return optimizer


class BitsAndBytesOptimizer(torch.optim.Optimizer):
    """What cpt adds to a class of bitsandbytes: fp32 states of embeddings, checkpoints, and stochastic rounding.

    Args:
        rounding: of bfloat16 weights; `None`: to nearest.
    """

    def __init__(
        self,
        groups: ParameterGroups,
        *,
        rounding: Literal["stochastic"] | None = None,
        **options: Any,
    ) -> None:
        self.rounding = rounding
        self.numbers: dict[torch.Tensor, int] = {}
        super().__init__(groups, **options)  # type: ignore[arg-type]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.numbers[parameter] = len(self.numbers)

    def get_config(self: Any, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """As transformers, with 32 bits for embeddings. bitsandbytes' `GlobalOptimManager` goes by the positions of
        parameters in groups, which change if gradients are released."""
        config: dict[str, Any] = super().get_config(gindex, pindex, group)  # type: ignore[misc]
        if group.get(IS_EMBEDDING, False):
            config["optim_bits"] = 32
        return config

    def update_step(
        self: Any, group: dict[str, Any], parameter: torch.Tensor, gindex: int, pindex: int
    ) -> None:
        """Update fp32 copies of bfloat16 weights, part by part, and round them: bitsandbytes would round to nearest,
        and lose small updates."""
        update = super().update_step  # type: ignore[misc]
        if self.rounding is None or parameter.dtype != torch.bfloat16:
            update(group, parameter, gindex, pindex)
            return
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        state = self.state[parameter]
        weights = flat(parameter)
        gradients = flat(parameter.grad.contiguous())
        generator = torch.Generator(parameter.device)
        for start in range(0, len(weights), AT_ONCE):
            end = min(start + AT_ONCE, len(weights))
            part = nn.Parameter(weights[start:end].float())
            part.grad = gradients[start:end].float()
            self.state[part] = dict(part_of_state(state, start, end))
            update(group, part, gindex, pindex)
            del self.state[part]
            # The noise depends on parameter, step and position, so that a resumed run draws the same.
            seed = mixed((self.numbers[parameter] + mixed(state["step"])) & LOW_BITS)
            generator.manual_seed(mixed((seed + start // AT_ONCE) & LOW_BITS))
            noise = torch.empty_like(part, dtype=torch.int32).random_(2**16, generator=generator)
            weights[start:end] = rounded(part.detach(), noise)
        state["step"] += 1

    def load_state_dict(self: Any, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Load states without a second copy of them all, and page large ones again: bitsandbytes 0.50 would leave them
        on the GPU."""
        for parameter, saved in load_groups(self, state_dict):
            refuse_other_states({"step", QUANTIZED}, saved)
            state = {"step": saved["step"]}
            for name, tensor in saved[QUANTIZED].items():
                state[name] = self.place(parameter, name, tensor)
            self.state[parameter] = state

    def place(self: Any, parameter: torch.Tensor, name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_small = parameter.numel() < FEWEST_ON_HOST
        if is_small or not self.is_paged or not parameter.is_cuda or "state" not in name:
            return tensor.to(parameter.device, copy=True)
        from bitsandbytes.functional import get_paged  # an extra

        paged: torch.Tensor = get_paged(*tensor.shape, dtype=tensor.dtype, device=parameter.device)
        return paged.copy_(tensor)


def part_of_state(state: dict[str, Any], start: int, end: int) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        if name.startswith("state"):
            part = value.view(-1)[start:end]
            part.is_paged = vars(value).get("is_paged", False)
            yield name, part
        elif name.startswith("absmax"):
            yield name, value[start // BLOCK : -(-end // BLOCK)]
        else:  # its step, and the map of codes to values
            yield name, value


def accepts_fp32_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether gradients of bfloat16 weights may be fp32; kernels of bitsandbytes alone would read both as fp32."""
    if isinstance(optimizer, BitsAndBytesOptimizer):
        return optimizer.rounding is not None
    return isinstance(optimizer, OneKernelAdamW)
