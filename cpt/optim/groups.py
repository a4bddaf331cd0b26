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
# Keys of a group, for optimizers that treat them separately.
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
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    ends = embeddings | parameters_of_head(model)
    parameters: dict[tuple[bool, bool, bool], list[nn.Parameter]] = defaultdict(list)
    for module, name, parameter in parameters_of(model):
        if not parameter.requires_grad:
            continue
        dimensions = len(shape_of(parameter))
        is_weight = dimensions >= 2 and not (by_role and has_another_role(module, name, parameter))
        # If only some rows of a head are trained (`cpt.models.new_rows`), the others must not decay.
        decays = is_weight and id(parameter) not in embeddings and UNDECAYED not in vars(parameter)
        is_end = embedding_learning_rate is not None and id(parameter) in ends
        is_matrix = is_weight and dimensions == 2 and id(parameter) not in ends
        is_separate = matrices_apart and not is_matrix
        is_separate = is_separate or embeddings_apart and id(parameter) in embeddings
        parameters[is_end, not decays, is_separate].append(parameter)
    if embedding_learning_rate is not None and not any(is_end for is_end, _, _ in parameters):
        raise RecipeError(
            "`optimizer.embedding_learning_rate`: embeddings and head are frozen. Use `lora: cpt`, or add them to"
            " `model.train_only`."
        )
    groups: ParameterGroups = []
    for is_end, without_decay, is_separate in sorted(parameters):
        group: dict[str, Any] = {"params": parameters[is_end, without_decay, is_separate]}
        if is_end:
            group["lr"] = embedding_learning_rate
        if without_decay:
            group["weight_decay"] = 0.0
        if matrices_apart:
            group[MATRICES] = not is_separate
        if embeddings_apart and is_separate:
            group[IS_EMBEDDING] = True
        groups.append(group)
    return groups


def parameters_of_head(model: nn.Module) -> set[int]:
    """Return the ids of the head's parameters; none if the model has no head that its class names."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        return set()
    head = base.get_output_embeddings()
    if head is None:
        return set()
    return {id(parameter) for parameter in head.parameters()}


def parameters_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield each parameter once, in the order of `model.parameters()`, with its module and its name there."""
    yielded: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in yielded:
                continue
            yielded.add(id(parameter))
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
