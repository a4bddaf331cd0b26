"""Which attention implementation a model runs with, and ours, `varlen`: attention within each document of packed rows,
by torch's or flash-attn's kernels, which take the documents' bounds instead of a mask. Where no kernel can run (on a
CPU, in fp32), torch's SDPA attends to one document after the other, which is as exact as a mask."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import varlen
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from cpt.errors import RecipeError, ResourceError
from cpt.hf_internals import flash_attention, supports_flash, supports_flex, supports_sdpa
from cpt.plugins import did_you_mean, import_named

OLDEST_GPU = (8, 0)  # compute capability; of flash kernels
HOPPER = (9, 0)  # the only one that flash-attn 3 is for
VARLEN = "varlen"
# Names without `flash`: transformers prepares other masks for those, and cannot keep the documents of several rows
# apart with them.
BY_PACKAGE = {"flash_attention_2": "varlen_fa2", "flash_attention_3": "varlen_fa3"}
VARLEN_NAMES = (VARLEN, *BY_PACKAGE.values())
HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD, WIDTH_MULTIPLE = 256, 8  # of flash kernels
ALTERED_SCORES = ("softcap", "s_aux", "position_bias")  # arguments of transformers' attention functions
DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")  # keys of configs
OTHER_SCORES = ("attn_logit_softcapping", "attention_chunk_size")
# Their packed rows were compared with each document alone: tests/models/test_varlen_models.py.
PROVEN = """
    apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cpt-gpt2 ctrl cwm deepseek_v2 deepseek_v3
    diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3_text gemma4_unified_text glm glm4
    glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama
    longcat_flash mellum minicpm3 minimax_m2 minimind2 minimind2_moe minimind3 minimind3_moe ministral ministral3
    mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 youtu
"""
WINDOW_IN_MASK_ONLY = ("phimoe", "qwen2_moe")  # or not even there: sdpa and flash attention differ with a window

Kernel = Callable[..., Tensor]
"""(queries, keys, values of [tokens of all rows, heads, width], bounds, longest document, scale, window) -> as the
queries."""
# torch 2.11 has no argument for fewer heads of keys: its kernel takes them as they are.
SAYS_GROUPED = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


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
        half_precision: the model computes in bf16 or fp16; flash attention knows no other types.
        packed: rows come without a mask: positions alone keep documents and padding apart.
    """
    register_varlen()
    if wanted == "auto":
        if why_not_by_bounds(model_class, config, half_precision=half_precision, packed=packed) is None:
            return VARLEN if missing_for("flash_attention_3") else BY_PACKAGE["flash_attention_3"]
        return "sdpa" if supports_sdpa(model_class) else "eager"
    if ":" in wanted and "/" not in wanted:
        AttentionInterface.register(wanted, import_named(wanted))
        AttentionMaskInterface.register(wanted, sdpa_mask)
        return wanted
    known = ["auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if wanted not in known and "/" not in wanted:  # with a slash it is a kernel on the Hub, which transformers fetches
        listed = f"{', '.join(known)}, or your own `package.module:function`"
        raise RecipeError(f"model.attention: no `{wanted}`.{did_you_mean(wanted, known)} Use {listed}.")
    remedy = "Use `model.attention: auto`."
    is_supported = {"flash": supports_flash, "sdpa": supports_sdpa, "flex": supports_flex}.get(wanted.split("_")[0])
    if is_supported is not None and not is_supported(model_class):
        raise RecipeError(f"model.attention: {model_class.__name__} cannot run with `{wanted}`. {remedy}")
    by_bounds = wanted == VARLEN or packed and wanted in BY_PACKAGE
    if by_bounds and (why := why_not_varlen(model_class, config)):
        raise RecipeError(f"model.attention: {wanted}: {why}. {remedy}")
    is_kernel = wanted in BY_PACKAGE or wanted == VARLEN and torch.cuda.is_available()
    if is_kernel and (missing := missing_for(wanted)):
        raise ResourceError(f"model.attention: {wanted}: {missing}. {remedy}")
    if packed and "flash" in wanted and wanted not in BY_PACKAGE:
        raise RecipeError(f"model.attention: with {wanted}, documents of packed rows leak into each other. {remedy}")
    if wanted == VARLEN and torch.cuda.is_available() and not half_precision:
        raise RecipeError(f"model.attention: varlen needs half precision. Set `training.bf16: true`. Or: {remedy}")
    return BY_PACKAGE[wanted] if packed and wanted in BY_PACKAGE else wanted


def why_not_by_bounds(
    model_class: type[PreTrainedModel], config: PreTrainedConfig | None, *, half_precision: bool, packed: bool
) -> str | None:
    """Why `auto` does not use a kernel that takes the bounds of documents; None where it does."""
    if not packed:
        return "rows come with a mask"
    if not half_precision or config is None:
        return "it computes in fp32"
    return why_not_varlen(model_class, config) or missing_for(VARLEN)


def missing_for(name: str) -> str | None:
    """What this machine lacks for `varlen` or a kernel of flash-attn."""
    if not torch.cuda.is_available():
        return "it needs a CUDA GPU and this machine has none"
    if name == VARLEN and torch.cuda.get_device_capability() < OLDEST_GPU:
        return f"{torch.cuda.get_device_name()} is older than flash kernels (compute capability 8.0)"
    if name == "flash_attention_3" and torch.cuda.get_device_capability() != HOPPER:
        return f"it is for Hopper GPUs, and this is a {torch.cuda.get_device_name()}"
    if name == "flash_attention_3" and not is_flash_attn_3_available():
        return "flash_attn_interface is not installed (github.com/Dao-AILab/flash-attention, hopper/)"
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        return "flash-attn is not installed (pip install flash-attn --no-build-isolation)"
    return None


def register_varlen() -> None:
    """Make the names known to transformers. Their masks are for rows that come with a mask, and are sdpa's."""
    kernels: dict[str, Kernel] = {VARLEN: torch_kernel}
    kernels |= {name: partial(package_kernel, package) for package, name in BY_PACKAGE.items()}
    for name, kernel in kernels.items():
        AttentionInterface.register(name, partial(varlen_attention, kernel))
        AttentionMaskInterface.register(name, sdpa_mask)


def varlen_attention(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """As transformers calls an attention function; with a true mask, or none, it is sdpa.

    Args:
        query: [rows, heads, tokens, width]; keys and values may have fewer heads.
        attention_mask: [1, 1, longest document, bounds], as `hand_over_documents` makes it.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:  # true masks are of booleans or fractions
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        attended: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return attended
    altered = [name for name in ALTERED_SCORES if options.get(name) is not None]
    if dropout or altered:
        why = "attention dropout" if dropout else f"`{altered[0]}`"
        remedy = " (or `model.config.attention_dropout: 0.0`, `attn_pdrop` in GPT-2)" if dropout else ""
        raise RecipeError(f"model.attention: varlen does not compute {why}. Use `model.attention: auto`{remedy}.")
    tokens, width, value_width = query.shape[2], query.shape[-1], value.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < tokens else None
    dtype = computing_dtype(query, key, value)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    bounds, longest = attention_mask.select(2, 0).flatten(), attention_mask.shape[2]
    is_whole = len(bounds) == 0  # each row is one document
    if is_whole and window is None and kernel is torch_kernel:
        # torch's SDPA picks the fastest kernel of the GPU: on Hopper cuDNN's, which `varlen_attn` cannot use.
        grouped = key.shape[1] != query.shape[1]
        query, key, value = same_width(query, key, value)
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        ).transpose(1, 2)
    else:
        if is_whole:
            longest = tokens
            bounds = torch.arange(0, len(query) * tokens + 1, tokens, dtype=torch.int32, device=query.device)
        # Rows end to end: a document never goes beyond its row, so that the bounds keep rows apart as well.
        laid_out = (states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value))
        attend = kernel if has_kernel(query, dtype) else attend_each
        output = attend(*laid_out, bounds, longest, scale, window).unflatten(0, (-1, tokens))
    return output if output.shape[-1] == value_width else output[..., :value_width], None


def why_not_varlen(model_class: type[PreTrainedModel], config: PreTrainedConfig | None) -> str | None:
    """Why a model cannot use these kernels; None where it can."""
    if not supports_flash(model_class):
        return f"{model_class.__name__} does not run with flash attention"
    if config is None:
        return None
    values = config.get_text_config().to_dict()
    if config.model_type not in PROVEN.split():
        return f"{config.model_type} has not been tried with it"
    if config.model_type in WINDOW_IN_MASK_ONLY and values.get("sliding_window"):
        return f"{config.model_type} does not tell its layers of its sliding window"
    if dropout := next((name for name in DROPOUTS if values.get(name)), None):
        return f"it has no dropout, and the model has {values[dropout]} (`model.config.{dropout}: 0.0` takes it away)"
    if other := next((name for name in OTHER_SCORES if values.get(name)), None):
        return f"it does not compute {config.model_type}'s `{other}`"
    heads = int(values.get("num_attention_heads") or values.get("n_head") or 1)
    width = int(values.get("qk_head_dim") or values.get("head_dim") or config.get_text_config().hidden_size // heads)
    return f"heads of {width} are wider than {WIDEST_HEAD}" if width > WIDEST_HEAD else None


def has_kernel(query: Tensor, dtype: torch.dtype) -> bool:
    return query.is_cuda and dtype in HALF


def computing_dtype(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    # Rotary embeddings and norms in fp32 widen some of them.
    return next((states.dtype for states in (value, key, query) if states.dtype in HALF), query.dtype)


def torch_kernel(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """torch's varlen_attn. Keys and values keep their fewer heads."""
    query, key, value = same_width(query, key, value)
    options: dict[str, Any] = {"enable_gqa": True} if SAYS_GROUPED and key.shape[1] != query.shape[1] else {}
    before = -1 if window is None else window - 1  # transformers counts the token itself
    return varlen.varlen_attn(  # type: ignore[return-value]
        query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(before, 0), **options
    )


def same_width(*states: Tensor) -> list[Tensor]:
    """Pad with zeros, which add nothing to a score, to the widest one, and to a multiple of eight."""
    widest = max(of.shape[-1] for of in states)
    width = widest + -widest % WIDTH_MULTIPLE
    return [of if of.shape[-1] == width else F.pad(of, (0, width - of.shape[-1])) for of in states]


def package_kernel(package: str, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """flash-attn's, called by transformers, which asks the tokens themselves for nothing when it gets the bounds."""
    q, k, v = (states[None] for states in same_width(query, key, value))
    return flash_attention(package, q, k, v, *others)[0]


@torch.compiler.disable  # other lengths in each batch: compiled, each batch would be a graph of its own
def attend_each(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float, window: int | None
) -> Tensor:
    """Document by document; on a GPU the host waits for the bounds."""
    lengths = [length for length in bounds.diff().tolist() if length]
    grouped = key.shape[1] != query.shape[1]
    outputs = []
    for parts in zip(*(states.split(lengths) for states in (query, key, value)), strict=True):
        length = parts[0].shape[0]
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
        q, k, v = (states.transpose(0, 1)[None] for states in parts)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)
