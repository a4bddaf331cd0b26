"""Optimizers that keep a preconditioner for each side of a matrix, by pytorch_optimizer."""

from collections.abc import Sequence
from typing import Any

import torch

from cpt.errors import ResourceError
from cpt.optim.groups import ParameterGroups


def soap(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.95, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    precondition_frequency: int = 10,
    max_precondition_dim: int = 10_000,
) -> torch.optim.Optimizer:
    """SOAP (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

    Args:
        precondition_frequency: steps between two eigenbases.
        max_precondition_dim: a longer side has no preconditioner.
    """
    options = {"precondition_frequency": precondition_frequency, "max_precondition_dim": max_precondition_dim}
    return build("SOAP", groups, learning_rate, betas, weight_decay=weight_decay, eps=eps, **options)


def shampoo(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.01,
    preconditioning_compute_steps: int = 10,
    block_size: int = 512,
) -> torch.optim.Optimizer:
    """Shampoo in blocks (arXiv 2002.09018).

    Args:
        preconditioning_compute_steps: steps between two roots of the preconditioners.
        block_size: matrices are cut into squares of this side, each with preconditioners of its own.
    """
    options = {"preconditioning_compute_steps": preconditioning_compute_steps, "block_size": block_size}
    decay = {"weight_decay": weight_decay, "decoupled_weight_decay": True}
    return build("ScalableShampoo", groups, learning_rate, betas, **decay, **options)


def build(
    name: str, groups: ParameterGroups, learning_rate: float, betas: Sequence[float], **options: Any
) -> torch.optim.Optimizer:
    try:
        import pytorch_optimizer  # type: ignore[import-not-found, unused-ignore]  # an extra
    except ImportError as problem:
        raise ResourceError(
            f"`optimizer.name`: {name} comes from pytorch_optimizer. Install it: pip install 'cpt[optimizers]'"
        ) from problem
    kind: Any = vars(pytorch_optimizer)[name]
    built: torch.optim.Optimizer = kind(groups, lr=learning_rate, betas=(betas[0], betas[1]), **options)
    return built
