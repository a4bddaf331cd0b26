"""From the recipe's `optimizer:` section to a torch optimizer over the model's parameter groups."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

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
    check_optimizer(section)
    build = find("optimizer", section.name, OPTIMIZERS)
    if offloaded:
        if section.name not in OFFLOADED:
            raise RecipeError(
                f"`optimizer.name`: `{section.name}` cannot keep its states in host memory under DeepSpeed; {', '.join(OFFLOADED)} can. "
                "Or take a DeepSpeed profile without offload_optimizer."
            )
        build = OFFLOADED[section.name]
    options = dict(section.options)
    groups = parameter_groups(model, embedding_learning_rate=options.pop("embedding_learning_rate", None))
    optimizer: torch.optim.Optimizer = build(groups, section.learning_rate, **options)
    return optimizer


def check_optimizer(section: Optimizer) -> None:
    """Refuse an optimizer that there is not, and options that it does not take.

    Raises:
        RecipeError: with what was probably meant.
    """
    check_options(find("optimizer", section.name, OPTIMIZERS), section.options, "optimizer", also=FOR_ALL)
    rate = section.options.get("embedding_learning_rate")
    if rate is not None and rate <= 0:
        raise RecipeError(
            f"`optimizer.embedding_learning_rate` must be more than 0, got {rate}. To freeze the embeddings, use `model.lora`."
        )


def parameter_groups(model: nn.Module, *, embedding_learning_rate: float | None = None) -> ParameterGroups:
    """The trainable parameters in two groups: matrices, and those without weight decay (embeddings, norms, biases).

    Args:
        embedding_learning_rate: embeddings and head get it, in groups of their own.

    Raises:
        RecipeError: it was given, and neither is trained.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    ends = embeddings | head_parameters(model) if embedding_learning_rate is not None else set()
    sorted_out: dict[tuple[bool, bool], list[nn.Parameter]] = {(end, decays): [] for end in (False, True) for decays in (True, False)}
    for parameter in model.parameters():
        if parameter.requires_grad:
            # A head of which only some rows learn (`cpt.models.new_rows`) must not decay in the others.
            is_matrix = dimensions(parameter) >= 2 and id(parameter) not in embeddings and "without_weight_decay" not in vars(parameter)
            sorted_out[id(parameter) in ends, is_matrix].append(parameter)
    if embedding_learning_rate is not None and not any(sorted_out[True, decays] for decays in (True, False)):
        raise RecipeError(
            "`optimizer.embedding_learning_rate` has no effect: neither embeddings nor head are trained. Remove it, or write `lora: cpt`."
        )
    groups: ParameterGroups = []
    for (end, decays), parameters in sorted_out.items():
        rate = {"lr": embedding_learning_rate} if end else {}
        groups.append({"params": parameters, **rate, **({} if decays else {"weight_decay": 0.0})})
    return [group for group in groups if group["params"]]


def head_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters of the layer that gives the logits, adapters on it included; of a model of transformers."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    head = whole.get_output_embeddings() if isinstance(whole, PreTrainedModel) else None
    return {id(parameter) for parameter in head.parameters()} if head is not None else set()


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
FOR_ALL: dict[str, Any] = {"embedding_learning_rate": float | None}
"""Options that every optimizer takes, your own too."""
