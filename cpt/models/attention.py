"""Which attention implementation a model runs with: the one asked for, or the fastest that is present and right."""

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from cpt.errors import RecipeError, ResourceError
from cpt.models.varlen_attention import BY_PACKAGE, VARLEN, register_varlen, why_not_varlen
from cpt.plugins import did_you_mean, import_named

FLASH_INSTALL = "pip install flash-attn --no-build-isolation"
OLDEST_GPU = (8, 0)  # compute capability; of flash kernels
HOPPER = (9, 0)  # the only one that flash-attn 3 is for


def choose_attention(
    wanted: str,
    model_class: type[PreTrainedModel],
    *,
    config: PreTrainedConfig | None = None,
    half_precision: bool = True,
    packed: bool = False,
) -> str:
    """The name to give transformers as `attn_implementation`.

    Args:
        wanted: `auto`, `varlen`, a name of transformers, or `package.module:function`, a function of its
            AttentionInterface (masked like sdpa).
        config: tells what of a model a kernel cannot compute.
        half_precision: the model computes in bf16 or fp16; flash attention knows no other types.
        packed: positions alone keep the documents of a row apart, and the padding behind them; no mask comes with the
            rows.

    Raises:
        RecipeError: the name is unknown, or the model cannot run with it.
        ResourceError: it needs a package or a GPU that this machine does not have.
    """
    register_varlen()
    if wanted == "auto":
        return _best(model_class, config, half_precision=half_precision, packed=packed)
    if ":" in wanted and "/" not in wanted:
        return register_attention(wanted)
    _check(wanted, model_class, config, half_precision=half_precision, packed=packed)
    return BY_PACKAGE[wanted] if packed and wanted in BY_PACKAGE else wanted


def register_attention(name: str) -> str:
    """Make the user's function known to transformers, with the mask that sdpa gets, and return its name there."""
    AttentionInterface.register(name, import_named(name))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def _best(
    model_class: type[PreTrainedModel], config: PreTrainedConfig | None, *, half_precision: bool, packed: bool
) -> str:
    if why_not_by_bounds(model_class, config, half_precision=half_precision, packed=packed) is None:
        return VARLEN if _missing_for_flash("flash_attention_3") else BY_PACKAGE["flash_attention_3"]
    return "sdpa" if model_class._supports_sdpa else "eager"


def why_not_by_bounds(
    model_class: type[PreTrainedModel], config: PreTrainedConfig | None, *, half_precision: bool, packed: bool
) -> str | None:
    """Why `auto` does not take a kernel that gets the bounds of documents; None where it does."""
    if not packed:
        return "rows come with a mask"
    if not half_precision or config is None:
        return "it computes in fp32"
    return why_not_varlen(model_class, config) or missing_for_varlen()


def missing_for_varlen() -> str | None:
    """What this machine lacks for torch's own kernel."""
    if not torch.cuda.is_available():
        return "it needs a CUDA GPU and this machine has none"
    if torch.cuda.get_device_capability() < OLDEST_GPU:
        return f"{torch.cuda.get_device_name()} is older than flash kernels (compute capability 8.0)"
    return None


def _missing_for_flash(name: str) -> str | None:
    if not torch.cuda.is_available():
        return "it needs a CUDA GPU and this machine has none. Use `model.attention: auto`"
    third = name == "flash_attention_3"
    if third and torch.cuda.get_device_capability() != HOPPER:
        return f"it is for Hopper GPUs, and this is a {torch.cuda.get_device_name()}. Use `model.attention: auto`"
    if not (is_flash_attn_3_available() if third else is_flash_attn_2_available()):
        install = (
            "Install flash_attn_interface (github.com/Dao-AILab/flash-attention, hopper/)"
            if third
            else f"Run: {FLASH_INSTALL}"
        )
        return (
            f"{'flash-attn 3' if third else 'flash-attn'} is not installed. {install}, or use `model.attention: auto`"
        )
    return None


def _check(
    wanted: str,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig | None,
    *,
    half_precision: bool,
    packed: bool,
) -> None:
    known = ["auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if wanted not in known and "/" not in wanted:  # with a slash it is a kernel on the Hub, which transformers fetches
        raise RecipeError(
            f"model.attention: no implementation called `{wanted}`.{did_you_mean(wanted, known)} "
            "Use auto, sdpa, eager, varlen, flash_attention_2, flex_attention, or your own `package.module:function`."
        )
    supported = {
        "flash": model_class._supports_flash_attn,
        "sdpa": model_class._supports_sdpa,
        "flex": model_class._supports_flex_attn,
    }
    kind = wanted.split("_")[0]
    if not supported.get(kind, True):
        raise RecipeError(
            f"model.attention: {model_class.__name__} cannot run with `{wanted}`. Use `model.attention: auto`."
        )
    by_bounds = wanted == VARLEN or packed and wanted in BY_PACKAGE
    if by_bounds and (why := why_not_varlen(model_class, config)):
        raise RecipeError(f"model.attention: {wanted}: {why}. Use `model.attention: auto`.")
    if wanted in BY_PACKAGE and (missing := _missing_for_flash(wanted)):
        raise ResourceError(f"model.attention: {wanted}: {missing}.")
    if packed and "flash" in wanted and wanted not in BY_PACKAGE:
        raise RecipeError(
            f"model.attention: {wanted}: transformers lets documents of packed rows leak into each other with it,"
            " where a micro-batch has several rows. Use `model.attention: auto`."
        )
    if wanted == VARLEN and torch.cuda.is_available():
        if missing := missing_for_varlen():
            raise ResourceError(f"model.attention: varlen: {missing}. Use `model.attention: auto`.")
        if not half_precision:
            raise RecipeError(
                "model.attention: varlen: its kernel computes in half precision. Set `training.bf16: true`, or use"
                " `model.attention: auto`."
            )
