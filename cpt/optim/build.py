"""From the recipe's `optimizer:` section to a torch optimizer over the model's parameter groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from cpt.errors import RecipeError
from cpt.extend import check_options, find
from cpt.optim.offloaded_adamw import offloaded_adamw
from cpt.recipe.schema import Optimizer

ParameterGroups = list[dict[str, Any]]


def build_optimizer(section: Optimizer, model: nn.Module, *, offloaded: bool = False) -> torch.optim.Optimizer:
    """Build the optimizer that the recipe names.

    Args:
        offloaded: DeepSpeed keeps the optimizer's states in host memory, where only its own AdamW works by default.

    Raises:
        RecipeError: no such optimizer, an option it does not take, or one that cannot work in host memory.
    """
    build = find("optimizer", section.name, OPTIMIZERS)
    check_options(build, section.options, "optimizer")
    if offloaded:
        if section.name not in OFFLOADED:
            raise RecipeError(
                f"`optimizer.name`: `{section.name}` cannot keep its states in host memory under DeepSpeed; {', '.join(OFFLOADED)} can. "
                "Or take a DeepSpeed profile without offload_optimizer."
            )
        build = OFFLOADED[section.name]
    optimizer: torch.optim.Optimizer = build(parameter_groups(model), section.learning_rate, **section.options)
    return optimizer


def parameter_groups(model: nn.Module) -> ParameterGroups:
    """The trainable parameters in two groups: matrices, and those without weight decay (embeddings, norms, biases)."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_matrix = dimensions(parameter) >= 2 and id(parameter) not in embeddings
            (matrices if is_matrix else others).append(parameter)
    groups: ParameterGroups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def dimensions(parameter: nn.Parameter) -> int:
    """Number of dimensions; ZeRO-3 keeps the true shape beside a parameter that holds 0 elements here."""
    return len(vars(parameter).get("ds_shape", parameter.shape))


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


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": adamw, "sgd": sgd}
OFFLOADED: dict[str, Callable[..., torch.optim.Optimizer]] = {"adamw": offloaded_adamw}
