"""Which layers of a model an adapter goes into, where the recipe does not say."""

from collections.abc import Iterator
from typing import Any

from peft.utils.constants import (
    EMBEDDING_LAYER_NAMES,
    TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING,
    TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING,
)
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.errors import RecipeError

ALL_LINEAR = "all-linear"


def adaptable(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers with their names, without the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            yield name, module


def default_targets(model: PreTrainedModel, method: str) -> dict[str, Any]:
    """All linear layers, but for the methods that are made for others.

    Raises:
        RecipeError: the model has none of the layers that the method is made for.
    """
    if method == "ln_tuning":
        return {
            "target_modules": last_names(name for name, part in model.named_modules() if "Norm" in type(part).__name__)
        }
    if method == "trainable_tokens":
        return {
            "target_modules": last_names(
                name for name, part in model.named_modules() if part is model.get_input_embeddings()
            )
        }
    if method == "beft":
        biased = last_names(
            name for name, layer in adaptable(model) if dict(layer.named_parameters()).get("bias") is not None
        )
        if not biased:
            raise RecipeError(
                f"`model.lora.method: beft` trains biases, and the linear layers of {model.config.model_type} have"
                " none. Take another."
            )
        return {"target_modules": biased}
    if method == "ia3":
        model_type = model.config.model_type
        return {
            "target_modules": TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING.get(model_type, ALL_LINEAR),
            "feedforward_modules": TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING.get(model_type, []),
        }
    return {"target_modules": ALL_LINEAR}


def last_names(names: Iterator[str]) -> list[str]:
    """What the layers are called in their own modules, each name once."""
    return sorted({name.rpartition(".")[2] for name in names})


def embedding_names(model: PreTrainedModel) -> list[str]:
    """What the model calls its embedding and its head, where that has weights of its own.

    Raises:
        RecipeError: they are one matrix under names that peft cannot keep together.
    """
    ends = [model.get_input_embeddings(), *([] if is_tied(model) else [model.get_output_embeddings()])]
    paths = {id(module): name for name, module in model.named_modules()}
    names = [paths[id(module)].rpartition(".")[2] for module in ends]
    if is_tied(model) and names[0] not in EMBEDDING_LAYER_NAMES:
        raise RecipeError(
            f"`model.lora`: the head of {model.config.model_type} is its embedding `{names[0]}`, of which peft would"
            " train only one side. Write `lora: {r: 128, lora_alpha: 32, use_rslora: true}`, which trains neither,"
            " or train all parameters (`lora: null`)."
        )
    return names


def is_tied(model: PreTrainedModel) -> bool:
    """True where embedding and head are one matrix."""
    return bool(model.config.get_text_config().tie_word_embeddings)
