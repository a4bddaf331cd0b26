"""From the recipe's `optimizer:` section to a torch optimizer over the model's parameter groups."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cpt.errors import RecipeError
from cpt.optim.adamw import adamw, adamw_8bit, fused_by_torch, paged_adamw_8bit, trains_half
from cpt.optim.groups import ParameterGroups, parameter_groups
from cpt.optim.muon import muon
from cpt.optim.offloaded_adamw import offloaded_adamw
from cpt.optim.preconditioned import shampoo, soap
from cpt.optim.released import RELEASING
from cpt.plugins import check_options, find
from cpt.recipe.schema import Optimizer, Recipe

log = logging.getLogger("cpt")


def build_optimizer(
    section: Optimizer, model: nn.Module, *, offloaded: bool = False, partitioned: bool = False
) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe names.

    Args:
        offloaded: DeepSpeed keeps the optimizer's states in host memory, where only its own AdamW works by default.
        partitioned: DeepSpeed's ZeRO, which gives an optimizer slices of all parameters in a row, and no matrices.

    Raises:
        RecipeError: no such optimizer, an option it does not take, or one that cannot work in host memory or on
        slices.
    """
    check_optimizer(section)
    build = find_optimizer(section.name)
    if partitioned:
        refuse_under_deepspeed(section)
        build = fused_by_torch if section.name == "adamw" else build
    if offloaded:
        if section.name not in OFFLOADED:
            raise RecipeError(
                f"`optimizer.name`: `{section.name}` cannot keep its states in host memory under DeepSpeed;"
                f" {', '.join(OFFLOADED)} can. Or take a DeepSpeed profile without offload_optimizer."
            )
        build = OFFLOADED[section.name]
    options = {name: value for name, value in section.options.items() if name != "release_gradients"}
    groups = parameter_groups(
        model,
        embedding_learning_rate=options.pop("embedding_learning_rate", None),
        matrices_apart=section.name == "muon",
        embeddings_apart=section.name in IN_LITTLE_MEMORY,
    )
    if section.name not in RELEASING and not partitioned and trains_half(groups):
        log.warning(
            f"optimizer.name: {section.name} keeps no fp32 copy of weights in half precision, so small updates are"
            " lost in rounding. Take adamw or adamw_8bit, or leave `model.dtype` out: the weights are fp32 then."
        )
    optimizer: torch.optim.Optimizer = build(groups, section.learning_rate, **options)
    return optimizer


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """A built-in, a function of the user's, or any library's class."""
    of_torch = {other.lower(): other for other, value in vars(torch.optim).items() if isinstance(value, type)}
    if name not in OPTIMIZERS and (other := of_torch.get(name.replace("_", "").lower())):
        raise RecipeError(
            f"`{name}` is not built in. Write `torch.optim:{other}`, which takes the options of its constructor."
        )
    return as_function(find("optimizer", name, OPTIMIZERS))


GIVEN = ("self", "params", "lr")


def as_function(found: Callable[..., Any]) -> Callable[..., Any]:
    """A function of groups and learning rate, whose keyword arguments are the class's; anything but an optimizer class
    stays as it is."""
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        return found

    def build(groups: list[dict[str, Any]], learning_rate: float, **options: Any) -> torch.optim.Optimizer:
        tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        kind: Callable[..., torch.optim.Optimizer] = found
        return kind(groups, lr=learning_rate, **tuples)

    taken = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=inspect.Parameter.empty)
        for name, parameter in inspect.signature(found.__init__).parameters.items()
        if name not in GIVEN and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    first = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("groups", "learning_rate")]
    build.__signature__ = inspect.Signature([*first, *taken])  # type: ignore[attr-defined]  # what `check_options` reads
    build.__name__ = found.__name__
    build.__annotations__ = {}
    return build


def refuse_under_deepspeed(section: Optimizer) -> None:
    """Refuse what DeepSpeed's ZeRO does in its own way."""
    if section.name in FOR_MATRICES:
        raise RecipeError(
            f"`optimizer.name`: `{section.name}` needs whole matrices, and DeepSpeed's ZeRO gives it slices of them."
            " Take adamw, or leave `training.deepspeed` out: without it each GPU has the whole model."
        )
    if section.name in IN_LITTLE_MEMORY:
        raise RecipeError(
            f"`optimizer.name`: the states of `{section.name}` are for whole parameters, and DeepSpeed's ZeRO cuts"
            " them. Take adamw: ZeRO divides its states over the GPUs or keeps them on the host. Or leave"
            " `training.deepspeed` out."
        )
    if section.options.get("rounding") is not None:
        raise RecipeError(
            "`optimizer.rounding`: DeepSpeed keeps an fp32 copy of the weights, so nothing is rounded. Remove it."
        )


def check_optimizer(section: Optimizer) -> None:
    """Refuse an optimizer that there is not, and options that it does not take."""
    check_options(find_optimizer(section.name), section.options, "optimizer", also=FOR_ALL)
    rate = section.options.get("embedding_learning_rate")
    if rate is not None and rate <= 0:
        raise RecipeError(
            f"`optimizer.embedding_learning_rate` must be more than 0, got {rate}. To freeze the embeddings, use"
            " `model.lora`."
        )


def check_rounding(recipe: Recipe) -> None:
    """Refuse a rounding of weights that are not rounded."""
    rounding, model = recipe.optimizer.options.get("rounding"), recipe.model
    if rounding is None:
        return
    if model.lora is not None:
        raise RecipeError("`optimizer.rounding` has no effect: adapters are fp32, whatever the model is. Remove it.")
    if model.dtype != "bfloat16" and recipe.training.get("deepspeed") is None:
        raise RecipeError(
            "`optimizer.rounding` is of bfloat16 weights, and this recipe has others: write `model.dtype: bfloat16`,"
            " or remove it."
        )


def sgd(
    groups: ParameterGroups, learning_rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Stochastic gradient descent, with momentum if asked."""
    return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw_8bit": adamw_8bit,
    "paged_adamw_8bit": paged_adamw_8bit,
    "sgd": sgd,
    "muon": muon,
    "soap": soap,
    "shampoo": shampoo,
}
IN_LITTLE_MEMORY = {"adamw_8bit", "paged_adamw_8bit"}
FOR_MATRICES = {"muon", "soap", "shampoo"}
OFFLOADED: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": offloaded_adamw}
FOR_ALL: dict[str, Any] = {"embedding_learning_rate": float | None, "release_gradients": bool}
"""Options that every optimizer takes, your own too."""
