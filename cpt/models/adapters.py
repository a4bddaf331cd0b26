"""LoRA through peft: put adapters on a model, and merge them into its weights."""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from cpt.errors import RecipeError
from cpt.extend import did_you_mean

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {
    "r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": "all-linear",
    "task_type": "CAUSAL_LM",
}
MAMBA_EXCLUDED = ("out_proj", "conv1d")  # peft refuses them: Mamba's kernels read these weights past the layer that holds the adapter


def check_lora_options(options: Mapping[str, Any]) -> None:
    """Refuse keys that are not LoraConfig's.

    Raises:
        RecipeError: with the key that was probably meant.
    """
    known = {field.name for field in dataclasses.fields(LoraConfig) if field.init}
    for key in options:
        if key not in known:
            raise RecipeError(f"`model.lora.{key}` is not an option of peft's LoraConfig.{did_you_mean(key, known)}")


def add_lora(model: PreTrainedModel, options: Mapping[str, Any]) -> PeftModel:
    """Freeze the model and add adapters, in fp32 whatever the model's dtype.

    Raises:
        RecipeError: an option is unknown, or no layer of the model matches `target_modules`.
    """
    check_lora_options(options)
    chosen = DEFAULTS | dict(options)
    if chosen["target_modules"] == "all-linear" and any(isinstance(module, nn.Conv1d) for module in model.modules()):
        chosen.setdefault("exclude_modules", list(MAMBA_EXCLUDED))
    # Else gradient checkpointing finds no input that needs a gradient, as the embedding is frozen, and the adapters learn nothing.
    model.enable_input_require_grads()
    try:
        adapted = get_peft_model(model, LoraConfig(**chosen), autocast_adapter_dtype=True)
    except (ValueError, TypeError) as problem:
        raise RecipeError(f"model.lora: {problem}") from problem
    trainable, total = adapted.get_nb_trainable_parameters()
    logger.info("LoRA: %s of %s parameters are trained (%.2f %%)", f"{trainable:,}", f"{total:,}", 100 * trainable / total)
    return adapted


def merge_lora(model: PeftModel) -> PreTrainedModel:
    """The plain model with the adapters added into its weights; refuses adapters that contain NaN."""
    return model.merge_and_unload(safe_merge=True)
