"""From the recipe's `optimizer:` section to a torch optimizer over the model's parameter groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cpt.errors import RecipeError
from cpt.extend import check_options, find
from cpt.optim.classes import as_function
from cpt.optim.groups import ParameterGroups, parameter_groups
from cpt.optim.muon import muon
from cpt.optim.offloaded_adamw import offloaded_adamw
from cpt.optim.preconditioned import shampoo, soap
from cpt.recipe.schema import Optimizer


def build_optimizer(section: Optimizer, model: nn.Module, *, offloaded: bool = False, partitioned: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe names.

    Args:
        offloaded: DeepSpeed keeps the optimizer's states in host memory, where only its own AdamW works by default.
        partitioned: DeepSpeed's ZeRO, which gives an optimizer slices of all parameters in a row, and no matrices.

    Raises:
        RecipeError: no such optimizer, an option it does not take, or one that cannot work in host memory or on slices.
    """
    check_optimizer(section)
    build = find_optimizer(section.name)
    if partitioned and section.name in FOR_MATRICES:
        raise RecipeError(
            f"`optimizer.name`: `{section.name}` needs whole matrices, and DeepSpeed's ZeRO gives it slices of them. Take adamw, or leave "
            "`training.deepspeed` out: without it each GPU has the whole model."
        )
    if offloaded:
        if section.name not in OFFLOADED:
            raise RecipeError(
                f"`optimizer.name`: `{section.name}` cannot keep its states in host memory under DeepSpeed; {', '.join(OFFLOADED)} can. "
                "Or take a DeepSpeed profile without offload_optimizer."
            )
        build = OFFLOADED[section.name]
    options = dict(section.options)
    groups = parameter_groups(
        model,
        learning_rate=section.learning_rate,
        embedding_learning_rate=options.pop("embedding_learning_rate", None),
        layer_decay=options.pop("layer_decay", None),
        matrices_apart=section.name in MATRICES_APART,
    )
    optimizer: torch.optim.Optimizer = build(groups, section.learning_rate, **options)
    return optimizer


def find_optimizer(name: str) -> Callable[..., torch.optim.Optimizer]:
    """A built-in, a function of the user's, or any library's class.

    Raises:
        RecipeError: nothing has that name.
    """
    return as_function(find("optimizer", name, OPTIMIZERS))


def check_optimizer(section: Optimizer) -> None:
    """Refuse an optimizer that there is not, and options that it does not take.

    Raises:
        RecipeError: with what was probably meant.
    """
    check_options(find_optimizer(section.name), section.options, "optimizer", also=FOR_ALL)
    rate = section.options.get("embedding_learning_rate")
    if rate is not None and rate <= 0:
        raise RecipeError(
            f"`optimizer.embedding_learning_rate` must be more than 0, got {rate}. To freeze the embeddings, use `model.lora`."
        )
    decay = section.options.get("layer_decay")
    if decay is not None and not 0 < decay <= 1:
        raise RecipeError(f"`optimizer.layer_decay` is a share of the rate of the layer above: more than 0 and at most 1, got {decay}.")


def adamw(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """AdamW (arXiv 1711.05101) with torch's fused kernel."""
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=True)


def sgd(groups: ParameterGroups, learning_rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0) -> torch.optim.Optimizer:
    """Stochastic gradient descent, with momentum if asked."""
    return torch.optim.SGD(groups, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "sgd": sgd,
    "muon": muon,
    "soap": soap,
    "shampoo": shampoo,
}
MATRICES_APART = {"muon"}
FOR_MATRICES = {"muon", "soap", "shampoo"}
OFFLOADED: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": offloaded_adamw}
FOR_ALL: dict[str, Any] = {"embedding_learning_rate": float | None, "layer_decay": float | None}
"""Options that every optimizer takes, your own too."""
