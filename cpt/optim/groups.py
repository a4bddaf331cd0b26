"""Group a model's trainable parameters by weight decay, learning rate and kind of optimizer."""

from collections import defaultdict
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.new_rows import UNDECAYED

ParameterGroups = list[dict[str, Any]]
MATRICES, IS_EMBEDDING = (
    "is_matrices",
    "is_embedding",
)  # keys of a group, for optimizers that treat them separately


def parameter_groups(
    model: nn.Module,
    *,
    embedding_learning_rate: float | None = None,
    matrices_apart: bool = False,
    embeddings_apart: bool = False,
) -> ParameterGroups:
    """Group the trainable parameters: matrices, and those without weight decay (embeddings, norms, biases).

    Args:
        embedding_learning_rate: of embeddings and head, in separate groups.
        matrices_apart: each group has `MATRICES`, true for matrices inside of layers.
        embeddings_apart: groups of embeddings have `IS_EMBEDDING`.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    head = whole.get_output_embeddings() if isinstance(whole, PreTrainedModel) else None
    both_ends = embeddings | {
        id(parameter) for parameter in (head.parameters() if head is not None else ())
    }
    sorted_out: dict[tuple[bool, bool, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        # ZeRO-3 stores the true shape as an attribute; the parameter has 0 elements here.
        dimensions = len(vars(parameter).get("ds_shape", parameter.shape))
        # If only some rows of a head are trained (`cpt.models.new_rows`), the others must not decay.
        decays = (
            dimensions >= 2 and id(parameter) not in embeddings and UNDECAYED not in vars(parameter)
        )
        is_end = embedding_learning_rate is not None and id(parameter) in both_ends
        is_other = matrices_apart and (dimensions != 2 or id(parameter) in both_ends)
        is_other = is_other or embeddings_apart and id(parameter) in embeddings
        sorted_out[is_end, not decays, is_other].append(parameter)
    if embedding_learning_rate is not None and not any(is_end for is_end, _, _ in sorted_out):
        remedy = "Use `lora: cpt`, or add them to `model.train_only`."
        raise RecipeError(
            f"`optimizer.embedding_learning_rate`: embeddings and head are frozen. {remedy}"
        )
    groups: ParameterGroups = []
    for is_end, without_decay, is_other in sorted(sorted_out):
        group: dict[str, Any] = {"params": sorted_out[is_end, without_decay, is_other]}
        if is_end:
            group["lr"] = embedding_learning_rate
        if without_decay:
            group["weight_decay"] = 0.0
        if matrices_apart:
            group[MATRICES] = not is_other
        if embeddings_apart and is_other:
            group[IS_EMBEDDING] = True
        groups.append(group)
    return groups
