"""Frozen base weights in 4 bit under LoRA adapters (QLoRA, arXiv 2305.14314), by bitsandbytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig

from cpt.errors import RecipeError, ResourceError
from cpt.recipe.schema import LORA_QUANTIZATION

BLOCK, BLOCK_OF_SCALES = 64, 256
BYTES_OF_4_BIT = {
    False: 0.5 + 4 / BLOCK,  # a scale in fp32 for each block
    True: 0.5 + 1 / BLOCK + 4 / (BLOCK * BLOCK_OF_SCALES),  # a scale in 8 bit, and one in fp32 for 256 of those
}
"""Of each number, by whether the scales are quantized as well."""


@dataclass(frozen=True)
class Quantization:
    """How the weights of linear layers are kept."""

    kind: str
    """nf4: the quantiles of a normal distribution, fp4: floating-point numbers."""
    double: bool
    """The scales are quantized too."""

    def config(self, compute: torch.dtype | str) -> BitsAndBytesConfig:
        """What transformers takes; embeddings and head stay as they are."""
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=compute,
            bnb_4bit_quant_storage=torch.uint8,
        )


def quantization_of(lora: Mapping[str, Any] | None) -> Quantization | None:
    """What `model.lora` asks for; None where the base stays whole."""
    if lora is None or lora.get("quantize") is None:
        if lora is not None and "double_quantize" in lora:
            raise RecipeError("`model.lora.double_quantize` has no effect without `model.lora.quantize: nf4`.")
        return None
    return Quantization(str(lora["quantize"]), bool(lora.get("double_quantize", True)))


def check_quantization(lora: Mapping[str, Any] | None, *, zero3: bool) -> Quantization | None:
    """Refuse what cannot be quantized here.

    Raises:
        RecipeError: DeepSpeed's ZeRO-3, which divides weights.
        ResourceError: bitsandbytes is not installed.
    """
    found = quantization_of(lora)
    if found is not None and zero3:
        raise RecipeError(
            "`model.lora.quantize`: DeepSpeed's ZeRO-3 divides weights, and those in 4 bit cannot be divided. They are"
            " small: leave `training.deepspeed` out."
        )
    if found is not None and find_spec("bitsandbytes") is None:
        raise ResourceError("`model.lora.quantize` needs bitsandbytes. Install it: pip install 'cpt[bitsandbytes]'")
    return found


def keep_layout_on_cpu(model: nn.Module) -> None:
    """Have bitsandbytes leave 4-bit weights as they lie.

    On a CPU with AVX-512 and bfloat16 it packs them in another way the first time that they are read without
    gradients. That fails where the inputs are no multiple of a block, and gradients of later steps, which read them as
    if they lay as before, are wrong.
    """
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def without_quantization(lora: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in lora.items() if key not in LORA_QUANTIZATION}


def numbers_in(parameter: torch.Tensor) -> int:
    """How many weights a parameter stands for; one in 4 bit holds two in each byte."""
    state = vars(parameter).get("quant_state") if isinstance(parameter, nn.Parameter) else None
    return parameter.numel() if state is None else torch.Size(state.shape).numel()
