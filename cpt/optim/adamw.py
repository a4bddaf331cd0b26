"""AdamW (arXiv 1711.05101) for weights in half precision, with an fp32 master copy or rounding that needs none."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from cpt.errors import CheckpointError, RecipeError
from cpt.optim.adamw_update import adamw_update, can_launch, update_directly
from cpt.optim.groups import ParameterGroups
from cpt.recipe.schema import Recipe
from cpt.torch_internals import foreach_add

Rounding = Literal["kahan", "stochastic"]
MOMENTS = ("exp_avg", "exp_avg_sq")


def automatic_dtype(recipe: Recipe, *, deepspeed: bool, on_gpu: bool) -> torch.dtype:
    """Return the dtype for `model.dtype: auto`: bfloat16 if `training.bf16` is on and updates use an fp32 copy.

    DeepSpeed and `adamw` keep an fp32 master copy, and adapters are fp32. The other optimizers keep no copy, so their
    weights stay fp32, and so do FSDP2's shards, which are the master copy. Without a GPU bfloat16 does not save time,
    and without Triton, which `on_gpu` includes, `adamw` needs fp32 weights: no kernel updates a master copy.
    """
    training = recipe.training
    sharded = training.get("fsdp") or training.get("parallelism_config")
    has_master = on_gpu and not sharded and recipe.optimizer.name == "adamw"
    is_half = training.get("bf16") and (deepspeed or recipe.model.lora is not None or has_master)
    if is_half:
        return torch.bfloat16
    return torch.float32


def adamw(
    groups: ParameterGroups,
    learning_rate: float,
    of_engine: Callable[..., torch.optim.Optimizer] | None = None,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Rounding | None = None,
) -> torch.optim.Optimizer:
    """AdamW with torch's fused kernel; weights in half precision have fp32 moments and an fp32 master copy.

    Args:
        of_engine: another implementation, for an engine that keeps the fp32 weights, which need no rounding.
        rounding: of bfloat16 weights, instead of a master copy.
    """
    options: dict[str, Any] = {
        "lr": learning_rate,
        "betas": (betas[0], betas[1]),
        "eps": eps,
        "weight_decay": weight_decay,
    }
    if of_engine is not None:
        return of_engine(groups, **options)
    if trains_half(groups):
        return OneKernelAdamW(groups, rounding=rounding, **options)
    return fused_by_torch(groups, **options)


fused_by_torch = partial(torch.optim.AdamW, fused=True)


def trains_half(groups: ParameterGroups) -> bool:
    parameters = chain.from_iterable(group["params"] for group in groups)
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in parameters)


class OneKernelAdamW(torch.optim.Optimizer):
    """AdamW with fp32 states, one kernel for each parameter.

    Gradient scalers and the loss guard set `found_inf`, a flag on the device: if it is 1, a step changes no state, and
    the host does not wait for it. `grad_scale` divides the gradients.

    Args:
        rounding: of bfloat16 weights; None keeps fp32 master copies of weights in half precision.
        defaults: `lr`, `betas`, `eps` and `weight_decay`.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], *, rounding: Rounding | None = None, **defaults: Any
    ) -> None:
        self.rounding = rounding
        self.layouts: dict[torch.Tensor, dict[str, torch.dtype]] = {}
        """Names and dtypes of each parameter's states, except its step."""
        super().__init__(groups, {**defaults, "betas": tuple(defaults["betas"])})
        self._step_supports_amp_scaling = (
            True  # tells torch and accelerate that it handles `found_inf`
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state_of(parameter) for parameter in parameters]
            if states:
                # A skipping kernel changes no state, so steps can be counted before it.
                steps = [state["step"] for state in states]
                increments: Any = 1
                if self.found_inf is not None:
                    increments = [1 - self.found_inf.to(steps[0].device)] * len(steps)
                foreach_add(steps, increments)
            for parameter, state in zip(parameters, states, strict=True):
                self.update(parameter, state, group)

    def update(
        self, parameter: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        assert parameter.grad is not None, "only parameters with a gradient are updated"
        weights = flat(parameter)
        arrays = {name: flat(value) for name, value in state.items() if name != "step"}
        rounding = "nearest"
        if "master" in arrays:
            rounding = "master"
        elif parameter.dtype == torch.bfloat16 and self.rounding is not None:
            rounding = self.rounding
        update: Callable[..., None] = adamw_update
        if can_launch(weights):
            update = update_directly
        update(
            weights,
            flat(parameter.grad),
            arrays["exp_avg"],
            arrays["exp_avg_sq"],
            arrays.get("master", arrays.get("compensation")),
            state["step"],
            self.grad_scale,
            self.found_inf,
            rounding,
            self.numbers[parameter],
            group["lr"],
            group["weight_decay"],
            *group["betas"],
            group["eps"],
        )

    @property
    def has_master(self) -> bool:
        return any("master" in layout for layout in self.layouts.values())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            self.layouts[parameter] = self.layout(parameter)
        self.numbers = {parameter: number for number, parameter in enumerate(self.layouts)}

    def layout(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        if parameter.dtype == torch.float16 and self.rounding is not None:
            raise RecipeError("`optimizer.rounding` needs `model.dtype` bfloat16 or float32.")
        layout = dict.fromkeys(MOMENTS, torch.float32)
        if parameter.dtype != torch.float32 and self.rounding is None:
            layout["master"] = torch.float32
        if parameter.dtype == torch.bfloat16 and self.rounding == "kahan":
            layout["compensation"] = torch.bfloat16
        return layout

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name, dtype in self.layouts[parameter].items():
                state[name] = torch.zeros_like(
                    parameter, dtype=dtype, memory_format=torch.contiguous_format
                )
            if "master" in state:
                state["master"].copy_(parameter.detach())
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load states without rounding them to the parameters' dtype, as torch would."""
        for parameter, saved in load_groups(self, state_dict):
            refuse_other_states({"step", *self.layouts[parameter]}, saved)
            for name, tensor in self.state_of(parameter).items():
                tensor.copy_(saved[name])


def load_groups(
    optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[torch.Tensor, dict[str, Any]]]:
    """Load the groups without states; yield each parameter with its saved state."""
    torch.optim.Optimizer.load_state_dict(optimizer, {**state_dict, "state": {}})
    numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    by_number = dict(zip(numbers, parameters, strict=True))
    for number, saved in state_dict["state"].items():
        yield by_number[number], saved


def refuse_other_states(expected: set[str], saved: dict[str, Any]) -> None:
    if saved.keys() == expected:
        return
    remedy = "Use its recipe, or start with --new."
    if "exp_avg_scale" in saved:  # before December 2026
        remedy = (
            "cpt's own 8-bit states are replaced by bitsandbytes': finish this run with the version that began it, or"
            " train its weights with fresh states: cpt export RUN -o DIR, then `model.path: DIR`."
        )
    raise CheckpointError(
        f"`optimizer`: the checkpoint has {', '.join(sorted(saved))} for a parameter, not"
        f" {', '.join(sorted(expected))}. {remedy}"
    )


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view in one dimension; of a sharded tensor, this process' part."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.detach().view(-1)
