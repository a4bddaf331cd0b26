"""Choose a model's attention implementation, including ours, `varlen`: attention within each document of packed rows,
by torch's or flash-attn's kernels, which take the documents' bounds instead of a mask. If no kernel can run (on a CPU,
in fp32), torch's SDPA processes one document after the other, as exact as with a mask."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from cpt.distributed import print_once
from cpt.errors import RecipeError, ResourceError
from cpt.hf_internals import (
    attention_of,
    flash_attention,
    supports_flash,
    supports_flex,
    supports_sdpa,
)
from cpt.models.fused_loss import next_tokens
from cpt.models.inventory import runs_along_the_row
from cpt.plugins import did_you_mean, import_named
from cpt.torch_internals import mark_dynamic

OLDEST_GPU = (8, 0)  # compute capability for flash kernels
HOPPER = (9, 0)  # the only architecture that flash-attn 3 supports
VARLEN = "varlen"
# Names without `flash`: for names with it transformers prepares other masks, which do not separate the documents of
# several rows.
BY_PACKAGE = {"flash_attention_2": "varlen_fa2", "flash_attention_3": "varlen_fa3"}
VARLEN_NAMES = (VARLEN, *BY_PACKAGE.values())
HALF = (torch.float16, torch.bfloat16)
# Limits of flash kernels.
WIDEST_HEAD = 256
WIDTH_MULTIPLE = 8
# Arguments of transformers' attention functions.
ALTERED_SCORES = ("softcap", "s_aux", "position_bias")
# Keys of configs.
DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout", "attention_probs_dropout_prob")
OTHER_SCORES = ("attn_logit_softcapping", "attention_chunk_size")
# Packed rows were compared with separate documents: tests/models/test_varlen.py.
PROVEN = """
    apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe cpt-gpt2 ctrl cwm deepseek_v2 deepseek_v3
    diffllama ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3_text gemma4_unified_text glm glm4
    glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama
    longcat_flash mellum minicpm3 minimax_m2 minimind2 minimind2_moe minimind3 minimind3_moe ministral ministral3
    mistral mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 youtu
"""
# Their layers do not get the window, or ignore it: sdpa and flash attention differ.
WINDOW_IN_MASK_ONLY = ("phimoe", "qwen2_moe")

# Shapes: B rows, T tokens in a row, N tokens of all rows; H heads of queries, G of keys and values (H or fewer);
# W width of a query's or key's head, V of a value's.
Kernel = Callable[..., Tensor]
"""(query [N, H, W], key [N, G, W], value [N, G, V], bounds, longest document, scale, window) -> [N, H, V or wider]."""
# torch 2.11 needs no argument for grouped-query attention: its kernel detects it.
SAYS_GROUPED = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def choose_attention(
    attention: str,
    model_class: type[PreTrainedModel],
    *,
    config: PreTrainedConfig | None = None,
    half_precision: bool = True,
    packed: bool = False,
) -> str:
    """Return the `attn_implementation` for transformers.

    Args:
        attention: `auto`, `varlen`, a name of transformers, or `package.module:function`, a function of its
            AttentionInterface (masked like sdpa).
        half_precision: the model computes in bf16 or fp16; flash attention supports no other types.
        packed: rows have no mask: only positions separate documents and padding.
    """
    register_varlen()
    is_hub_kernel = "/" in attention
    if attention == "auto":
        return choose_automatically(
            model_class, config, half_precision=half_precision, packed=packed
        )
    if ":" in attention and not is_hub_kernel:
        AttentionInterface.register(attention, import_named(attention))
        AttentionMaskInterface.register(attention, sdpa_mask)
        return attention
    names = ["auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if attention not in names and not is_hub_kernel:
        listed = f"{', '.join(names)}, or `package.module:function`"
        raise RecipeError(
            f"model.attention: unknown `{attention}`.{did_you_mean(attention, names)} Use {listed}."
        )
    check_attention(attention, model_class, config, half_precision=half_precision, packed=packed)
    if packed and attention in BY_PACKAGE:
        return BY_PACKAGE[attention]
    return attention


def check_attention(
    attention: str,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig | None,
    *,
    half_precision: bool,
    packed: bool,
) -> None:
    """Refuse an attention that this model, these rows or this machine do not allow."""
    remedy = "Use `model.attention: auto`."
    supports = {"flash": supports_flash, "sdpa": supports_sdpa, "flex": supports_flex}.get(
        attention.split("_")[0]
    )
    if supports is not None and not supports(model_class):
        raise RecipeError(
            f"model.attention: {model_class.__name__} cannot run with `{attention}`. {remedy}"
        )
    if attention == VARLEN or packed and attention in BY_PACKAGE:
        reason = why_not_varlen(model_class, config)
        if reason is not None:
            raise RecipeError(f"model.attention: {attention}: {reason}. {remedy}")
    # Without a GPU, varlen attends document by document.
    if attention in BY_PACKAGE or attention == VARLEN and torch.cuda.is_available():
        missing = missing_for(attention)
        if missing is not None:
            raise ResourceError(f"model.attention: {attention}: {missing}. {remedy}")
    if packed and "flash" in attention and attention not in BY_PACKAGE:
        raise RecipeError(
            f"model.attention: with {attention}, documents of packed rows leak into each other. {remedy}"
        )
    if attention == VARLEN and torch.cuda.is_available() and not half_precision:
        raise RecipeError(
            f"model.attention: varlen needs half precision. Set `training.bf16: true`. Or: {remedy}"
        )


def choose_automatically(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig | None,
    *,
    half_precision: bool,
    packed: bool,
) -> str:
    """Return the fastest attention that this model, these rows and this machine allow."""
    reason = why_not_by_bounds(model_class, config, half_precision=half_precision, packed=packed)
    if reason is None:
        if missing_for("flash_attention_3"):
            return VARLEN
        return BY_PACKAGE["flash_attention_3"]
    if supports_sdpa(model_class):
        return "sdpa"
    return "eager"


def why_not_by_bounds(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig | None,
    *,
    half_precision: bool,
    packed: bool,
) -> str | None:
    """Return why `auto` does not use a kernel with document bounds; None if it does."""
    if not packed:
        return "rows have a mask"
    if not half_precision or config is None:
        return "it computes in fp32"
    return why_not_varlen(model_class, config) or missing_for(VARLEN)


def missing_for(name: str) -> str | None:
    """Return what this machine lacks for `varlen` or a flash-attn kernel."""
    if not torch.cuda.is_available():
        return "it needs a CUDA GPU"
    if name == VARLEN and torch.cuda.get_device_capability() < OLDEST_GPU:
        return (
            f"{torch.cuda.get_device_name()} is older than flash kernels (compute capability 8.0)"
        )
    if name == "flash_attention_3":
        if torch.cuda.get_device_capability() != HOPPER:
            return f"it needs a Hopper GPU, and this is a {torch.cuda.get_device_name()}"
        if not is_flash_attn_3_available():
            return "flash_attn_interface is not installed (github.com/Dao-AILab/flash-attention, hopper/)"
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        return "flash-attn is not installed (pip install flash-attn --no-build-isolation)"
    return None


def backward_may_be_nan(capability: tuple[int, int], *, has_masks: bool) -> bool:
    """Whether gradients of cuDNN's attention may be NaN: on Hopper with masks (pytorch#196678)."""
    return has_masks and capability[0] == HOPPER[0]


def leave_out_cudnn(*, has_masks: bool) -> None:
    """Disable cuDNN's attention in this process where its gradients may be NaN."""
    if not torch.cuda.is_available():
        return
    if backward_may_be_nan(torch.cuda.get_device_capability(), has_masks=has_masks):
        torch.backends.cuda.enable_cudnn_sdp(False)
        print_once(
            "Attention: without cuDNN, whose gradients may be NaN with masks (pytorch#196678)."
        )


def register_varlen() -> None:
    """Register the names in transformers. Rows with a mask use sdpa's masks."""
    kernels: dict[str, Kernel] = {VARLEN: torch_kernel}
    for package, name in BY_PACKAGE.items():
        kernels[name] = partial(package_kernel, package)
    for name, kernel in kernels.items():
        AttentionInterface.register(name, partial(varlen_attention, kernel))
        AttentionMaskInterface.register(name, sdpa_mask)


def varlen_attention(
    kernel: Kernel,
    module: nn.Module,
    query: Tensor,  # (B, H, T, W)
    key: Tensor,  # (B, G, T, W)
    value: Tensor,  # (B, G, T, V)
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for transformers; with an ordinary mask, or none, it is sdpa.

    Args:
        attention_mask: [1, 1, longest document, bounds], as `hand_over_documents` makes it.

    Returns:
        The attended values, [B, T, H, V], and no weights.
    """
    # Ordinary masks have booleans or floats.
    if attention_mask is None or attention_mask.dtype != torch.int32:
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        attended: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return attended
    refuse_other_scores(dropout, options)
    tokens = query.shape[2]
    value_width = value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window
    if window is not None and window >= tokens:
        window = None
    query, key, value = in_computing_dtype(query, key, value)
    bounds = attention_mask.select(2, 0).flatten()
    longest = attention_mask.shape[2]
    is_row_one_document = len(bounds) == 0
    if is_row_one_document and window is None and kernel is torch_kernel:
        output = attend_whole_rows(query, key, value, scale)
    else:
        if is_row_one_document:
            longest = tokens
            bounds = torch.arange(
                0, len(query) * tokens + 1, tokens, dtype=torch.int32, device=query.device
            )
        attend = kernel if has_kernel(query, query.dtype) else attend_each
        query = concatenated(query)
        key = concatenated(key)
        value = concatenated(value)
        output = attend(query, key, value, bounds, longest, scale, window)
        output = output.unflatten(0, (-1, tokens))
    if output.shape[-1] != value_width:  # padded for the kernel
        output = output[..., :value_width]
    return output, None


def refuse_other_scores(dropout: float, options: Mapping[str, Any]) -> None:
    """Refuse settings that change scores and lack an argument in these kernels."""
    remedy = "Use `model.attention: auto`"
    if dropout:
        keys = "`model.config.attention_dropout: 0.0`, `attn_pdrop` in GPT-2"
        raise RecipeError(
            f"model.attention: varlen does not support attention dropout. {remedy} (or {keys})."
        )
    for name in ALTERED_SCORES:
        if options.get(name) is not None:
            raise RecipeError(f"model.attention: varlen does not support `{name}`. {remedy}.")


def attend_whole_rows(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend in rows of one document each; return [B, T, H, V].

    torch's SDPA picks the fastest kernel of the GPU: on Hopper cuDNN's, which `varlen_attn` has from 2.15 on.
    """
    is_grouped = key.shape[1] != query.shape[1]
    query, key, value = same_width(query, key, value)
    output = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=is_grouped
    )
    return output.transpose(1, 2)


def concatenated(states: Tensor) -> Tensor:
    """[B, H, T, W] -> [N, H, W]: documents end within their row, so their bounds also separate rows."""
    return states.transpose(1, 2).flatten(0, 1).contiguous()


def why_not_varlen(
    model_class: type[PreTrainedModel], config: PreTrainedConfig | None
) -> str | None:
    """Return why a model cannot use these kernels; None if it can."""
    if not supports_flash(model_class):
        return f"{model_class.__name__} does not support flash attention"
    if config is None:
        return None
    values = config.get_text_config().to_dict()
    if config.model_type not in PROVEN.split():
        return f"{config.model_type} is not tested with it"
    if config.model_type in WINDOW_IN_MASK_ONLY and values.get("sliding_window"):
        return f"{config.model_type} does not pass its sliding window to its layers"
    for name in DROPOUTS:
        if values.get(name):
            return f"dropout is not supported, and the model has {values[name]} (set `model.config.{name}: 0.0`)"
    for name in OTHER_SCORES:
        if values.get(name):
            return f"it does not support {config.model_type}'s `{name}`"
    heads = int(values.get("num_attention_heads") or values.get("n_head") or 1)
    width = int(
        values.get("qk_head_dim")
        or values.get("head_dim")
        or config.get_text_config().hidden_size // heads
    )
    if width > WIDEST_HEAD:
        return f"heads of {width} are wider than {WIDEST_HEAD}"
    return None


def has_kernel(query: Tensor, dtype: torch.dtype) -> bool:
    return query.is_cuda and dtype in HALF


def in_computing_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dtype = computing_dtype(query, key, value)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def computing_dtype(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    # Rotary embeddings and norms in fp32 upcast some of them.
    for states in (value, key, query):
        if states.dtype in HALF:
            return states.dtype
    return query.dtype


def torch_kernel(
    query: Tensor,  # (N, H, W)
    key: Tensor,  # (N, G, W)
    value: Tensor,  # (N, G, V)
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """torch's varlen_attn; keys and values may have fewer heads."""
    query, key, value = same_width(query, key, value)
    options: dict[str, Any] = {}
    if SAYS_GROUPED and key.shape[1] != query.shape[1]:
        options["enable_gqa"] = True
    tokens_before = -1 if window is None else window - 1  # transformers includes the token itself
    return varlen.varlen_attn(  # type: ignore[return-value]
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(tokens_before, 0),
        **options,
    )


def same_width(*states: Tensor) -> list[Tensor]:
    """Pad to the widest tensor and a multiple of eight, with zeros, which do not change scores."""
    widest = max(tensor.shape[-1] for tensor in states)
    width = widest + -widest % WIDTH_MULTIPLE
    padded = []
    for tensor in states:
        if tensor.shape[-1] != width:
            tensor = F.pad(tensor, (0, width - tensor.shape[-1]))
        padded.append(tensor)
    return padded


def package_kernel(
    package: str, query: Tensor, key: Tensor, value: Tensor, *arguments: Any
) -> Tensor:
    """flash-attn's kernel, called through transformers with the bounds."""
    query, key, value = same_width(query, key, value)
    return flash_attention(package, query[None], key[None], value[None], *arguments)[0]


@torch.compiler.disable  # lengths differ in each batch, so each would be compiled again
def attend_each(
    query: Tensor,  # (N, H, W)
    key: Tensor,  # (N, G, W)
    value: Tensor,  # (N, G, V)
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend document by document; on a GPU the host waits for the bounds."""
    lengths = [length for length in bounds.diff().tolist() if length]
    is_grouped = key.shape[1] != query.shape[1]
    queries = query.split(lengths)
    keys = key.split(lengths)
    values = value.split(lengths)
    outputs = []
    for length, query, key, value in zip(lengths, queries, keys, values, strict=True):
        mask = None
        if window is not None and window < length:
            mask = (
                torch.ones(length, length, dtype=torch.bool, device=query.device)
                .tril()
                .triu(1 - window)
            )
        output = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            key.transpose(0, 1)[None],
            value.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=is_grouped,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


# --- bounds of documents ---
# Computed once per batch, and passed to the attention of every layer instead of a mask; also if several processes
# share a row (DeepSpeed Ulysses, whose attention drops the mask, so that documents would attend to each other).


# transformers' names.
BOUNDS = "cu_seq_lens_q"
LONGEST = "max_length_q"
# With one of these a row has no bounds. transformers 5.24 renamed `past_key_values` to `cache`.
MASK_AND_CACHE = ("attention_mask", "cache", "past_key_values")
FEWEST_BOUNDS = 32
FEWEST_TOKENS = 128  # the longest document is rounded up to it; block size of kernels
# Share of the largest logit. bf16 rounds by 0.004, and kernels add in another order for other lengths.
TOLERANCE = 0.02
# Packed losses and gradients were compared with those of one process: tests/models/test_several_processes.py.
PROVEN_SHARED = """
    apertus arcee aria_text bitnet cohere cohere2 cohere2_moe cwm ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo
    gemma gemma3_text glm glm4 glm4_moe granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna llama mellum minimax_m2 minimind2 minimind3
    ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe phi phi3 qwen2 qwen2_moe qwen3
    qwen3_moe smollm3 solar_open stablelm starcoder2
"""


def document_bounds(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the start of each document in the concatenated rows, and the end of the last one, int32.

    As in transformers' masks, a document begins at the start of each row, and at each position that does not follow
    the previous one. The last number is repeated up to a power of two, for few different shapes: kernels see documents
    without tokens. More would cost memory: flash kernels reserve 128 rows per document in the backward pass. Empty if
    each row is one document, since causal attention then needs no bounds. Positions are [B, T].
    """
    is_start = torch.ones_like(position_ids, dtype=torch.bool)
    is_start[:, 1:] = position_ids.diff(dim=1) != 1
    starts = is_start.flatten().nonzero().flatten()
    if len(starts) == len(position_ids):
        return torch.empty(0, dtype=torch.int32, device=position_ids.device)
    size = max(FEWEST_BOUNDS, 2 ** len(starts).bit_length())
    bounds = torch.full(
        (size,), position_ids.numel(), dtype=torch.int32, device=position_ids.device
    )
    bounds[: len(starts)] = starts
    return bounds


def add_document_bounds(batch: dict[str, Any]) -> dict[str, Any]:
    """Add the bounds to the batch, unless it has a mask or no positions, and the length of its longest document,
    rounded up to a power of two: kernels start that many blocks per document."""
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or batch.get("attention_mask") is not None:
        return batch
    bounds = document_bounds(positions)
    longest = int(bounds.diff().max()) if len(bounds) else positions.shape[1]
    return {**batch, BOUNDS: bounds, LONGEST: max(FEWEST_TOKENS, 2 ** (longest - 1).bit_length())}


def hand_over_documents(
    model: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Forward pre-hook of a model without its head: pass bounds, from the batch or its positions, as the mask.

    transformers passes a 4-dimensional mask on unchanged, and every layer's attention receives it, even if layers drop
    other arguments or gradient checkpointing runs a layer again. The longest document's length is a dimension of it,
    without memory: a number would need a compiled graph for each length. Rows with a mask, or with a cache of keys and
    values, are not changed; without `hands_over_documents` transformers makes a mask from the positions.
    """
    kwargs = dict(keywords)
    bounds = kwargs.pop(BOUNDS, None)
    longest = kwargs.pop(LONGEST, None)
    positions = kwargs.get("position_ids")
    if positions is None or positions.dim() != 2 or not model.hands_over_documents:
        return arguments, kwargs
    if any(kwargs.get(name) is not None for name in MASK_AND_CACHE):
        return arguments, kwargs
    if bounds is None:
        inputs = [kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *arguments]
        num_rows = next(len(tensor) for tensor in inputs if tensor is not None)
        bounds = document_bounds(positions.expand(num_rows, -1))
    mask = bounds.expand(1, 1, longest or positions.shape[1], -1)
    mark_dynamic(mask, [2, 3])  # one graph for any number and length of documents
    kwargs["attention_mask"] = mask
    return arguments, kwargs


def keep_documents_apart(model: PreTrainedModel) -> None:
    check_documents_can_be_handed_over(model)
    model.base_model.register_forward_pre_hook(hand_over_documents, with_kwargs=True)
    model.base_model.hands_over_documents = True  # type: ignore[assignment]


@contextmanager
def plain_attention(model: PreTrainedModel) -> Iterator[None]:
    """Attend by torch's math kernel, with a mask between the documents of a row."""
    base: Any = model.base_model
    implementation = attention_of(model.config)
    hands_over = vars(base).get("hands_over_documents", False)
    is_other_kernel = implementation not in (*VARLEN_NAMES, "sdpa", "eager")
    base.hands_over_documents = False
    if is_other_kernel:
        model.set_attn_implementation("sdpa")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        if is_other_kernel:
            model.set_attn_implementation(implementation)
        del base.hands_over_documents
        if hands_over:
            base.hands_over_documents = True


def check_documents_can_be_handed_over(model: PreTrainedModel) -> None:
    if runs_along_the_row(model):
        raise RecipeError(
            f"model.attention: varlen does not separate documents in {model.config.model_type}'s recurrent layers. Use"
            " sdpa, with `data.packing: token_budget` or `none`."
        )


def try_documents_apart(model: PreTrainedModel) -> None:
    """If the class sets `keeps_documents_apart`, compare two documents in one row with separate documents."""
    embedding = model.get_input_embeddings().get_parameter("weight")
    ids = torch.arange(1, 9, device=embedding.device).unsqueeze(0) % len(embedding)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]], device=embedding.device)

    def logits_of(tokens: slice) -> Tensor:
        logits: Tensor = model(input_ids=ids[:, tokens], position_ids=positions[:, tokens]).logits
        return logits

    was_training = model.training
    model.eval()
    with torch.no_grad():
        in_one_row = logits_of(slice(None))
        first = logits_of(slice(0, 5))
        second = logits_of(slice(5, 8))
    separate = torch.cat([first, second], dim=1)
    model.train(was_training)
    largest = float((in_one_row - separate).abs().max())
    if not largest <= TOLERANCE * float(separate.abs().max()):  # also for NaN
        leak = f"the second document of a row depends on the first: logits differ by {largest:.2g}"
        raise RecipeError(
            f"{type(model).__name__} sets `keeps_documents_apart`, but {leak}. Fix its forward."
        )


def wants_bounds(model: nn.Module | None) -> bool:
    """Whether batches should have bounds: the hook is registered, and the model accepts further arguments."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(base, PreTrainedModel):
        return False
    if "hands_over_documents" not in vars(base.base_model):
        return False
    parameters = inspect.signature(base.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


# --- rows that several processes share ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartOfRows:
    """Cuts micro-batches; picklable for worker processes."""

    number: int
    """Index of this process' part, in token order."""
    parts: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this process' tokens, each with the next token's label, also across parts; bounds are not cut."""
        rows = add_document_bounds(batch)
        documents = {name: rows.pop(name) for name in (BOUNDS, LONGEST)}
        labels = next_tokens(rows.pop("labels"))
        rows |= {"labels": labels, "shift_labels": labels}
        part = {}
        for name, tensor in rows.items():
            part[name] = tensor.chunk(self.parts, dim=1)[self.number].contiguous()
        return part | documents


def check_shared_rows(config: PreTrainedConfig, parts: int, attention: str) -> None:
    """Refuse models that would train differently on parts of rows."""
    key = "`training.parallelism_config.sp_size`"
    values = config.get_text_config().to_dict()
    if attention not in VARLEN_NAMES:
        raise RecipeError(
            f"{key}: `{attention}` does not separate documents. Write `model.attention: {VARLEN}`."
        )
    if config.model_type not in PROVEN_SHARED.split():
        raise RecipeError(
            f"{key}: {config.model_type} is not tested on parts of rows. Remove it: ZeRO-3 and FSDP2 split any model."
        )
    if values.get("output_router_logits") and values.get("router_aux_loss_coef"):
        remedy = "Write `model.config.router_aux_loss_coef: 0.0`"
        raise RecipeError(
            f"{key}: the balance of experts would be computed on parts of rows. {remedy}."
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = int(values.get(name) or values["num_attention_heads"])
        if heads % parts:
            raise RecipeError(
                f"{key} is {parts}, which does not divide {config.model_type}'s {heads} `{name}`."
            )


def attend_over_processes(config: PreTrainedConfig, micro_batch: int, group: Any) -> None:
    """Give whole rows and their document bounds to the model's attention, instead of DeepSpeed's own, which accelerate
    has installed."""
    # Imported here: only runs that use DeepSpeed have it.
    from deepspeed.runtime.sequence_parallel import ulysses_sp

    name = attention_of(config)
    text = config.get_text_config()
    # A new interface has the registered functions, without accelerate's change.
    registered = AttentionInterface()[name]
    exchange = ulysses_sp.UlyssesSPAttentionHF(
        attn=registered,
        batch_size=micro_batch,
        attn_head_count=text.num_attention_heads,
        attn_head_size=vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads,
        kv_head_count=text.num_key_value_heads,
        num_hidden_layers=text.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )

    def attention(module: nn.Module, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        # It gathers positions in each layer, for kernels that need them; with bounds one number is enough.
        if module.training:
            options["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
        return exchange(module, query, *arguments, **options)

    ALL_ATTENTION_FUNCTIONS[name] = attention
