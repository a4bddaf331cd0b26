"""Which attention implementation a model runs with: the one asked for, or the best that is present and right."""

import importlib.util

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cpt.errors import RecipeError, ResourceError
from cpt.extend import did_you_mean, import_named

FLASH_INSTALL = "pip install flash-attn --no-build-isolation"


def choose_attention(wanted: str, model_class: type[PreTrainedModel], *, half_precision: bool = True) -> str:
    """The name to give transformers as `attn_implementation`.

    Args:
        wanted: `auto`, a name of transformers, or `package.module:function`, a function of its AttentionInterface (masked like sdpa).
        half_precision: the model computes in bf16 or fp16; flash attention knows no other types.

    Raises:
        RecipeError: the name is unknown, or the model cannot run with it.
        ResourceError: it needs a package or a GPU that this machine does not have.
    """
    if wanted == "auto":
        return _best(model_class, half_precision)
    if ":" in wanted and "/" not in wanted:
        return register_attention(wanted)
    _check(wanted, model_class)
    return wanted


def register_attention(name: str) -> str:
    """Make the user's function known to transformers, with the mask that sdpa gets, and return its name there."""
    AttentionInterface.register(name, import_named(name))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _best(model_class: type[PreTrainedModel], half_precision: bool) -> str:
    if half_precision and model_class._supports_flash_attn and _missing_for_flash() is None:
        return "flash_attention_2"
    return "sdpa" if model_class._supports_sdpa else "eager"


def _missing_for_flash() -> str | None:
    if not torch.cuda.is_available():
        return "it needs a CUDA GPU and this machine has none. Use `model.attention: sdpa`"
    if importlib.util.find_spec("flash_attn") is None:
        return f"flash-attn is not installed. Run: {FLASH_INSTALL}, or use `model.attention: sdpa`"
    return None


def _check(wanted: str, model_class: type[PreTrainedModel]) -> None:
    known = ["auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if wanted not in known and "/" not in wanted:  # with a slash it is a kernel on the Hub, which transformers fetches
        raise RecipeError(
            f"model.attention: no implementation called `{wanted}`.{did_you_mean(wanted, known)} "
            "Use auto, sdpa, eager, flash_attention_2, flex_attention, or your own `package.module:function`."
        )
    supported = {
        "flash": model_class._supports_flash_attn,
        "sdpa": model_class._supports_sdpa,
        "flex": model_class._supports_flex_attn,
    }
    kind = wanted.split("_")[0]
    if not supported.get(kind, True):
        raise RecipeError(f"model.attention: {model_class.__name__} cannot run with `{wanted}`. Use `model.attention: auto`.")
    if wanted == "flash_attention_2" and (missing := _missing_for_flash()):
        raise ResourceError(f"model.attention: flash_attention_2: {missing}.")
