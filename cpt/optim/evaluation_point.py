"""Optimizers that evaluate at other weights than they train, as schedule-free ones do (arXiv 2405.15682).

They have `train()` and `eval()`, which move the weights. Held-out sets, samples, `final/` and the weights in a
checkpoint are those of `eval()`; a checkpoint also has the weights of `train()`, so that a run resumes exactly.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import RecipeError

MODES = ("train", "eval")


def has_evaluation_point(optimizer: torch.optim.Optimizer) -> bool:
    return all(callable(getattr(inner(optimizer), mode, None)) for mode in MODES)


def inner(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper, which has both modes for any optimizer."""
    if isinstance(optimizer, AcceleratedOptimizer):
        return optimizer.optimizer
    return optimizer


def refuse_shards(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Sharding engines keep the weights elsewhere, so that `eval()` would not move the model's."""
    if has_evaluation_point(optimizer):
        raise RecipeError(
            f"`optimizer.name`: {name} evaluates at other weights than it trains, which DeepSpeed and FSDP do not"
            " support. Use adamw, or remove `training.deepspeed` and `training.fsdp`."
        )


@contextmanager
def evaluation_point(optimizer: torch.optim.Optimizer | None) -> Iterator[bool]:
    """Move the weights to where the optimizer evaluates them; yield whether it does so.

    Afterwards the weights are as before bit for bit, from a copy: the optimizer's own way back rounds, and an
    evaluation must not change the training.
    """
    moving: Any = inner(optimizer)
    if moving is None or not has_evaluation_point(moving):
        yield False
        return
    weights = list(chain.from_iterable(group["params"] for group in moving.param_groups))
    copies = [weight.detach().clone() for weight in weights]
    moving.eval()
    try:
        yield True
    finally:
        moving.train()
        with torch.no_grad():
            for weight, copied in zip(weights, copies, strict=True):
                weight.copy_(copied)


class EndsAtEvaluationPoint(TrainerCallback):
    """After the last step, leaves the weights where the optimizer evaluates them, before other callbacks read them."""

    order = -1  # `cpt.training.callbacks`: the first

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        optimizer = inner(kwargs["optimizer"])
        if has_evaluation_point(optimizer):
            optimizer.eval()


def copy_of_weights(model: nn.Module, *, only_trained: bool) -> dict[str, torch.Tensor]:
    """Copy the model's weights; those that share memory still do."""
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    weights = {
        name: weight
        for name, weight in model.state_dict().items()
        if name in trained or not only_trained
    }
    return copy.deepcopy(weights)


def training_point(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights that the next step starts from."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def return_to_training_point(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    trained = training_point(model)
    with torch.no_grad():
        for name, weight in weights.items():
            trained[name].copy_(weight)
