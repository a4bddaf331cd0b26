"""Group a model's trainable parameters by weight decay, learning rate and kind of optimizer."""

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.models.new_rows import UNDECAYED

ParameterGroups = list[dict[str, Any]]
# keys of a group, for optimizers that treat them separately
MATRICES = "is_matrices"
IS_EMBEDDING = "is_embedding"

# Parameters that are not weights of a projection, convolution or expert, whatever their shape. Words of their names:
ROLES = re.compile(
    r"(?<![a-z])(bias(es)?|scales?|gamma|beta|alpha|lambda|temp|norm|sinks?|time|pos|position(al)?|emb|embed"
    r"|embeddings?|tokens?)(?![a-z])"
)
WHOLE_NAMES = {"A_log", "D", "query", "probe"}  # of state spaces; learned queries of attention
MATRIX = re.compile(r"(?<![a-z])(weight|proj)[^a-z]*$")  # `pos_proj` is a projection
MODULES = re.compile(r"Norm(Gated|\dd)?$|Position|RelativeLogits")


def parameter_groups(
    model: nn.Module,
    *,
    embedding_learning_rate: float | None = None,
    matrices_apart: bool = False,
    embeddings_apart: bool = False,
    by_role: bool = True,
) -> ParameterGroups:
    """Group the trainable parameters: weights, and those without weight decay: embeddings, norms, biases and the like.

    Args:
        embedding_learning_rate: of embeddings and head, in separate groups.
        matrices_apart: each group has `MATRICES`, true for matrices inside of layers.
        embeddings_apart: groups of embeddings have `IS_EMBEDDING`.
        by_role: a bias that is stored as a matrix is a bias. False for runs of earlier versions, where every
            parameter with two dimensions had weight decay.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    head = whole.get_output_embeddings() if isinstance(whole, PreTrainedModel) else None
    both_ends = embeddings | {
        id(parameter) for parameter in (head.parameters() if head is not None else ())
    }
    sorted_out: dict[tuple[bool, bool, bool], list[nn.Parameter]] = defaultdict(list)
    for module, name, parameter in parameters_of(model):
        if not parameter.requires_grad:
            continue
        is_weight = len(shape_of(parameter)) >= 2 and not (
            by_role and has_another_role(module, name, parameter)
        )
        # If only some rows of a head are trained (`cpt.models.new_rows`), the others must not decay.
        decays = is_weight and id(parameter) not in embeddings and UNDECAYED not in vars(parameter)
        is_end = embedding_learning_rate is not None and id(parameter) in both_ends
        is_matrix = is_weight and len(shape_of(parameter)) == 2 and id(parameter) not in both_ends
        is_other = matrices_apart and not is_matrix
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


def parameters_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each parameter once, in the order of `model.parameters()`, with its module and its name there."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, nn.ParameterList):  # its parameters are numbered
                name = path.rpartition(".")[2]
            yield module, name, parameter


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the true shape, which ZeRO-3 stores as an attribute; the parameter has 0 elements there."""
    return tuple(vars(parameter).get("ds_shape", parameter.shape))


def has_another_role(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is no weight, by its name, its module, or because it is a vector in more dimensions.

    A weight with one row, such as a gate's, is a weight.
    """
    if isinstance(module, nn.ParameterDict):  # adapters, whose parameters have the adapter's name
        return False
    if MODULES.search(type(module).__name__) or name in WHOLE_NAMES:
        return True
    if MATRIX.search(name):
        return False
    is_vector = sum(length > 1 for length in shape_of(parameter)) < 2
    return is_vector or ROLES.search(name) is not None
