"""A model's trainable parameters in groups: which decay, which learn at a rate of their own, which are whole matrices
inside of layers."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError

ParameterGroups = list[dict[str, Any]]
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
MATRICES = "is_matrices"
"""Key of a group for optimizers that treat matrices apart."""
IS_EMBEDDING = "is_embedding"
"""Key of a group for optimizers that treat embeddings apart."""


@dataclass(frozen=True, order=True)
class Kind:
    """What parameters of one group have in common."""

    is_end: bool
    """Embeddings or head, which have a learning rate of their own."""
    without_decay: bool
    below_top: int
    """Layers between it and the head, where each has its own rate."""
    is_other: bool
    """Not a matrix inside of a layer, or an embedding, for optimizers that ask."""


def parameter_groups(
    model: nn.Module,
    *,
    learning_rate: float = 0.0,
    embedding_learning_rate: float | None = None,
    layer_decay: float | None = None,
    matrices_apart: bool = False,
    embeddings_apart: bool = False,
) -> ParameterGroups:
    """The trainable parameters: matrices, and those without weight decay (embeddings, norms, biases).

    Args:
        learning_rate: of the top layers, where `layer_decay` is given.
        embedding_learning_rate: embeddings and head get it, in groups of their own.
        layer_decay: each layer learns at this share of the rate of the one above it, embeddings as if they were below
            the first (arXiv 1801.06146).
        matrices_apart: groups say by `MATRICES` whether they are weights of layers, neither embedding nor head, with
            two dimensions.
        embeddings_apart: those of embeddings say so by `IS_EMBEDDING`.

    Raises:
        RecipeError: a rate was given for parameters that are not trained.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    both_ends = embeddings | head_parameters(model)
    depths = layers_below_top(model) if layer_decay is not None else {}
    sorted_out: dict[Kind, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # A head of which only some rows learn (`cpt.models.new_rows`) must not decay in the others.
        decays = (
            dimensions(parameter) >= 2
            and id(parameter) not in embeddings
            and "without_weight_decay" not in vars(parameter)
        )
        is_end = embedding_learning_rate is not None and id(parameter) in both_ends
        is_other = matrices_apart and (dimensions(parameter) != 2 or id(parameter) in both_ends)
        is_other = is_other or embeddings_apart and id(parameter) in embeddings
        sorted_out[Kind(is_end, not decays, 0 if is_end else depths.get(name, 0), is_other)].append(parameter)
    if embedding_learning_rate is not None and not any(kind.is_end for kind in sorted_out):
        raise RecipeError(
            "`optimizer.embedding_learning_rate` has no effect: neither embeddings nor head are trained. Remove it, or"
            " write `lora: cpt`."
        )
    groups: ParameterGroups = []
    for kind in sorted(sorted_out):
        group: dict[str, Any] = {"params": sorted_out[kind]}
        if kind.is_end:
            group["lr"] = embedding_learning_rate
        elif layer_decay is not None:
            group["lr"] = learning_rate * layer_decay**kind.below_top
        if kind.without_decay:
            group["weight_decay"] = 0.0
        if matrices_apart:
            group[MATRICES] = not kind.is_other
        if embeddings_apart and kind.is_other:
            group[IS_EMBEDDING] = True
        groups.append(group)
    return groups


def layers_below_top(model: nn.Module) -> dict[str, int]:
    """Name of a parameter -> how many layers are between it and the head; embeddings lie below the first layer, all
    else above the last."""
    numbers = {name: int(found[1]) for name, _ in model.named_parameters() if (found := LAYER.search(name))}
    if not numbers:
        raise RecipeError(
            "`optimizer.layer_decay` has no effect: no layers are trained, or their names do not number them."
            " Remove it."
        )
    layers = max(numbers.values()) + 1
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    below = {name: layers for name, parameter in model.named_parameters() if id(parameter) in embeddings}
    return below | {name: layers - 1 - number for name, number in numbers.items()}


def head_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters of the layer that gives the logits, adapters on it included; of a model of
    transformers."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    head = whole.get_output_embeddings() if isinstance(whole, PreTrainedModel) else None
    return {id(parameter) for parameter in head.parameters()} if head is not None else set()


def dimensions(parameter: nn.Parameter) -> int:
    """Number of dimensions; ZeRO-3 keeps the true shape beside a parameter that holds 0 elements here."""
    return len(vars(parameter).get("ds_shape", parameter.shape))
