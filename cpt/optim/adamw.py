"""AdamW (arXiv 1711.05101) in all its forms: which one the weights' type asks for, and those that save memory."""

from collections.abc import Sequence

import torch

from cpt.optim.groups import ParameterGroups
from cpt.optim.one_kernel_adamw import OneKernelAdamW, Rounding
from cpt.recipe.schema import Recipe

DEFAULT_ROUNDING: Rounding = "stochastic"
"""Its loss came nearest to that of fp32 weights (docs/optimizers.md), and it needs no state."""


def automatic_dtype(recipe: Recipe, *, deepspeed: bool, on_gpu: bool) -> torch.dtype:
    """What `model.dtype: auto` means: bfloat16 where `training.bf16` is on and the updates are made in fp32 elsewhere.

    DeepSpeed and `adamw` keep an fp32 master copy, and adapters are fp32 themselves. The other optimizers keep none,
    so their weights stay fp32, and so do FSDP2's shards, which are the master copy. Without a GPU bfloat16 saves no
    time.
    """
    training = recipe.training
    sharded = training.get("fsdp") or training.get("parallelism_config")
    has_master = on_gpu and not sharded and recipe.optimizer.name == "adamw"
    is_half = training.get("bf16") and (deepspeed or recipe.model.lora is not None or has_master)
    return torch.bfloat16 if is_half else torch.float32


def adamw(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Rounding | None = None,
) -> torch.optim.Optimizer:
    """AdamW with torch's fused kernel; weights in half precision have an fp32 master copy, and their moments are fp32
    as well.

    Args:
        rounding: of bfloat16 weights, in place of a master copy.
    """
    options = {"lr": learning_rate, "betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
    if trains_half(groups):
        return OneKernelAdamW(groups, rounding=rounding, **options)  # type: ignore[arg-type]
    return torch.optim.AdamW(groups, fused=True, **options)  # type: ignore[arg-type]


def trains_half(groups: ParameterGroups) -> bool:
    return any(parameter.dtype in (torch.bfloat16, torch.float16) for group in groups for parameter in group["params"])


def fused_by_torch(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
) -> torch.optim.Optimizer:
    """Torch's own, with states in the parameters' type: DeepSpeed keeps the fp32 weights."""
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, fused=True
    )


def adamw_8bit(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Rounding = DEFAULT_ROUNDING,
) -> torch.optim.Optimizer:
    """AdamW with moments in 8 bit (arXiv 2110.02861); those of embeddings are fp32.

    Args:
        rounding: of bfloat16 weights; fp32 weights are not rounded.
    """
    options = {"lr": learning_rate, "betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
    return OneKernelAdamW(groups, eight_bit=True, rounding=rounding, **options)  # type: ignore[arg-type]


def paged_adamw_8bit(
    groups: ParameterGroups,
    learning_rate: float,
    *,
    betas: Sequence[float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    rounding: Rounding = DEFAULT_ROUNDING,
) -> torch.optim.Optimizer:
    """As `adamw_8bit`, with the states of large parameters in pinned host memory, from where they come to the GPU
    while it computes."""
    options = {"lr": learning_rate, "betas": (betas[0], betas[1]), "eps": eps, "weight_decay": weight_decay}
    return OneKernelAdamW(groups, eight_bit=True, paged=True, rounding=rounding, **options)  # type: ignore[arg-type]
