"""LoRA through peft: put adapters on a model, and merge them into its weights."""

import dataclasses
import logging
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D

from cpt.errors import RecipeError
from cpt.extend import did_you_mean
from cpt.models.quantized import quantization_of, without_quantization
from cpt.recipe.schema import LORA_QUANTIZATION

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}
PRESETS: dict[str, dict[str, Any]] = {
    # Continued pre-training wants a high rank on all layers (arXiv 2405.09673), which needs the rank-stabilised scale (arXiv 2312.03732).
    "cpt": {"r": 128, "lora_alpha": 32, "use_rslora": True},
}
MAMBA_EXCLUDED = ("out_proj", "conv1d")  # peft refuses them: Mamba's kernels read these weights past the layer that holds the adapter


def check_lora_options(options: Mapping[str, Any]) -> None:
    """Refuse keys that are not LoraConfig's.

    Raises:
        RecipeError: with the key that was probably meant.
    """
    quantization_of(options)
    known = {field.name for field in dataclasses.fields(LoraConfig) if field.init} | {*LORA_QUANTIZATION}
    for key in options:
        if key not in known and key != "preset":
            raise RecipeError(f"`model.lora.{key}` is not an option of peft's LoraConfig.{did_you_mean(key, known)}")


def check_lora(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Refuse adapters that the model has no place for; a model without weights will do.

    Raises:
        RecipeError: nothing is called as `target_modules` or `modules_to_save` say, with what there is.
    """
    check_lora_options(options)
    chosen = lora_options(model, options)
    layers = sorted({name.rpartition(".")[2] for name, module in adaptable(model)})
    if not layers:
        raise RecipeError(f"`model.lora`: {model.config.model_type} has no linear layer that peft can adapt. Write `lora: null`.")
    names = {name for name, _ in model.named_modules() if name}
    head = model.get_output_embeddings()
    ends = sorted({name.rpartition(".")[2] for name, part in model.named_modules() if part is head or isinstance(part, nn.Embedding)})
    there_is = {
        "target_modules": (layers, f"Its linear layers: {', '.join(layers)}. `all-linear` takes all of them."),
        "modules_to_save": ([*ends, *layers], f"Its embeddings and head: {', '.join(ends)}. `lora: cpt` takes them."),
    }
    for key, (known, told) in there_is.items():
        wanted = chosen.get(key) or []
        patterns = [] if wanted == "all-linear" else [wanted] if isinstance(wanted, str) else [rf"(.*\.)?{re.escape(w)}" for w in wanted]
        for pattern, word in zip(patterns, [wanted] if isinstance(wanted, str) else wanted, strict=False):
            if not any(re.fullmatch(pattern, name) for name in names):
                guess = did_you_mean(word, known)
                raise RecipeError(f"`model.lora.{key}`: {model.config.model_type} has nothing called `{word}`.{guess} {told}")


def adaptable(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers with their names, without the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            yield name, module


def count_lora_parameters(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    """How many numbers are trained when all linear layers get adapters: r x (inputs + outputs) each, and what is trained whole."""
    chosen = lora_options(model, options)
    adapters = sum(int(chosen["r"]) * sum(shape_of(module)) for _, module in adaptable(model))
    whole = set(chosen.get("modules_to_save") or ())
    return adapters + sum(math.prod(shape_of(module)) for name, module in model.named_modules() if name.rpartition(".")[2] in whole)


def shape_of(layer: nn.Module) -> torch.Size:
    """Of the layer's weight."""
    return layer.get_parameter("weight").shape


def add_lora(model: PreTrainedModel, options: Mapping[str, Any]) -> PeftModel:
    """Freeze the model and add adapters, in fp32 whatever the model's dtype, as is what else is trained.

    Raises:
        RecipeError: an option is unknown, or no layer of the model matches `target_modules`.
    """
    check_lora_options(options)
    chosen = lora_options(model, options)
    # Else gradient checkpointing finds no input that needs a gradient, as the embedding is frozen, and the adapters learn nothing.
    model.enable_input_require_grads()
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft asks transformers in words that it will drop
            adapted = get_peft_model(model, LoraConfig(**chosen), autocast_adapter_dtype=True)
    except (ValueError, TypeError) as problem:
        raise RecipeError(f"model.lora: {problem}") from problem
    if not is_deepspeed_zero3_enabled():  # there DeepSpeed keeps fp32 copies of all that is trained
        for module in adapted.modules():
            if isinstance(module, ModulesToSaveWrapper):
                train_in_fp32(module, around=model.dtype)
    trainable, total = adapted.get_nb_trainable_parameters()
    logger.info("LoRA: %s of %s parameters are trained (%.2f %%)", f"{trainable:,}", f"{total:,}", 100 * trainable / total)
    return adapted


def lora_options(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """The whole options of peft's LoraConfig: ours, those of the preset, and what the recipe says on top."""
    options, preset = without_quantization(options), options.get("preset")
    chosen = DEFAULTS | PRESETS.get(str(preset), {}) | {key: value for key, value in options.items() if key != "preset"}
    if chosen["target_modules"] == "all-linear" and any(isinstance(module, nn.Conv1d) for module in model.modules()):
        chosen.setdefault("exclude_modules", list(MAMBA_EXCLUDED))
    if preset is not None and "modules_to_save" not in options:
        chosen["modules_to_save"] = embedding_names(model)
        chosen.setdefault("ensure_weight_tying", is_tied(model))
    return chosen


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
            f"`model.lora`: the head of {model.config.model_type} is its embedding `{names[0]}`, of which peft would train only one side. "
            "Write `lora: {r: 128, lora_alpha: 32, use_rslora: true}`, which trains neither, or train all parameters (`lora: null`)."
        )
    return names


def is_tied(model: PreTrainedModel) -> bool:
    """True where embedding and head are one matrix."""
    return bool(model.config.get_text_config().tie_word_embeddings)


def train_in_fp32(wrapper: ModulesToSaveWrapper, *, around: torch.dtype) -> None:
    """Small steps are lost in bfloat16. What an embedding gives keeps the type that the layers around it have; a head takes any."""
    for module in wrapper.modules_to_save.values():
        module.float()
        if around == torch.float32:
            continue
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda _, __, output: output.to(around))
        else:
            module.register_forward_pre_hook(lambda layer, inputs: tuple(value.to(layer.weight.dtype) for value in inputs))


def merge_lora(model: PeftModel) -> PreTrainedModel:
    """The plain model with the adapters added into its weights; refuses adapters that contain NaN."""
    return model.merge_and_unload(safe_merge=True)
