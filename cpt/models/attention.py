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
# of flash kernels
WIDEST_HEAD = 256
WIDTH_MULTIPLE = 8
ALTERED_SCORES = (
    "softcap",
    "s_aux",
    "position_bias",
)  # arguments of transformers' attention functions
DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "attn_dropout",
    "attention_probs_dropout_prob",
)  # keys of configs
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
WINDOW_IN_MASK_ONLY = (
    "phimoe",
    "qwen2_moe",
)  # or ignore it: sdpa and flash attention differ with a window

Kernel = Callable[..., Tensor]
"""(queries, keys, values of [tokens of all rows, heads, width], bounds, longest document, scale, window) -> output of
the queries' shape."""
# torch 2.11 needs no argument for grouped-query attention: its kernel detects it.
SAYS_GROUPED = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def choose_attention(
    wanted: str,
    model_class: type[PreTrainedModel],
    *,
    config: PreTrainedConfig | None = None,
    half_precision: bool = True,
    packed: bool = False,
) -> str:
    """Return the `attn_implementation` for transformers.

    Args:
        wanted: `auto`, `varlen`, a name of transformers, or `package.module:function`, a function of its
            AttentionInterface (masked like sdpa).
        half_precision: the model computes in bf16 or fp16; flash attention supports no other types.
        packed: rows have no mask: only positions separate documents and padding.
    """
    register_varlen()
    if wanted == "auto":
        return choose_automatically(
            model_class, config, half_precision=half_precision, packed=packed
        )
    if ":" in wanted and "/" not in wanted:
        AttentionInterface.register(wanted, import_named(wanted))
        AttentionMaskInterface.register(wanted, sdpa_mask)
        return wanted
    known = ["auto", "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]
    if wanted not in known and "/" not in wanted:  # names with a slash are kernels on the Hub
        listed = f"{', '.join(known)}, or `package.module:function`"
        raise RecipeError(
            f"model.attention: unknown `{wanted}`.{did_you_mean(wanted, known)} Use {listed}."
        )
    remedy = "Use `model.attention: auto`."
    is_supported = {"flash": supports_flash, "sdpa": supports_sdpa, "flex": supports_flex}.get(
        wanted.split("_")[0]
    )
    if is_supported is not None and not is_supported(model_class):
        raise RecipeError(
            f"model.attention: {model_class.__name__} cannot run with `{wanted}`. {remedy}"
        )
    by_bounds = wanted == VARLEN or packed and wanted in BY_PACKAGE
    if by_bounds and (why := why_not_varlen(model_class, config)):
        raise RecipeError(f"model.attention: {wanted}: {why}. {remedy}")
    is_kernel = wanted in BY_PACKAGE or wanted == VARLEN and torch.cuda.is_available()
    if is_kernel and (missing := missing_for(wanted)):
        raise ResourceError(f"model.attention: {wanted}: {missing}. {remedy}")
    if packed and "flash" in wanted and wanted not in BY_PACKAGE:
        raise RecipeError(
            f"model.attention: with {wanted}, documents of packed rows leak into each other. {remedy}"
        )
    if wanted == VARLEN and torch.cuda.is_available() and not half_precision:
        raise RecipeError(
            f"model.attention: varlen needs half precision. Set `training.bf16: true`. Or: {remedy}"
        )
    if packed and wanted in BY_PACKAGE:
        return BY_PACKAGE[wanted]
    return wanted


def choose_automatically(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig | None,
    *,
    half_precision: bool,
    packed: bool,
) -> str:
    """The fastest attention that this model, these rows and this machine allow."""
    reason = why_not_by_bounds(model_class, config, half_precision=half_precision, packed=packed)
    if reason is None:
        if missing_for("flash_attention_3"):
            return VARLEN
        return BY_PACKAGE["flash_attention_3"]
    return "sdpa" if supports_sdpa(model_class) else "eager"


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
    if name == "flash_attention_3" and torch.cuda.get_device_capability() != HOPPER:
        return f"it needs a Hopper GPU, and this is a {torch.cuda.get_device_name()}"
    if name == "flash_attention_3" and not is_flash_attn_3_available():
        return (
            "flash_attn_interface is not installed (github.com/Dao-AILab/flash-attention, hopper/)"
        )
    if name == "flash_attention_2" and not is_flash_attn_2_available():
        return "flash-attn is not installed (pip install flash-attn --no-build-isolation)"
    return None


def backward_may_be_nan(capability: tuple[int, int], *, has_masks: bool) -> bool:
    """Whether gradients of cuDNN's attention may be NaN: on Hopper with masks (pytorch#196678)."""
    return has_masks and capability[0] == HOPPER[0]


def leave_out_cudnn(*, has_masks: bool) -> None:
    """Disable cuDNN's attention in this process where its gradients may be NaN."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if backward_may_be_nan(capability, has_masks=has_masks):
        torch.backends.cuda.enable_cudnn_sdp(False)
        print_once(
            "Attention: without cuDNN, whose gradients may be NaN with masks (pytorch#196678)."
        )


def register_varlen() -> None:
    """Register the names in transformers. Rows with a mask use sdpa's masks."""
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
    """The attention function for transformers; with an ordinary mask, or none, it is sdpa.

    Args:
        query: [rows, heads, tokens, width]; keys and values may have fewer heads.
        attention_mask: [1, 1, longest document, bounds], as `hand_over_documents` makes it.
    """
    if (
        attention_mask is None or attention_mask.dtype != torch.int32
    ):  # ordinary masks have booleans or floats
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        attended: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return attended
    altered = [name for name in ALTERED_SCORES if options.get(name) is not None]
    if dropout or altered:
        why = "attention dropout" if dropout else f"`{altered[0]}`"
        remedy = (
            " (or `model.config.attention_dropout: 0.0`, `attn_pdrop` in GPT-2)" if dropout else ""
        )
        raise RecipeError(
            f"model.attention: varlen does not support {why}. Use `model.attention: auto`{remedy}."
        )
    tokens = query.shape[2]
    width = query.shape[-1]
    value_width = value.shape[-1]
    scale = width**-0.5 if scaling is None else scaling
    window = sliding_window if sliding_window is not None and sliding_window < tokens else None
    dtype = computing_dtype(query, key, value)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    bounds = attention_mask.select(2, 0).flatten()
    longest = attention_mask.shape[2]
    is_whole = len(bounds) == 0  # each row is one document
    if is_whole and window is None and kernel is torch_kernel:
        # torch's SDPA picks the fastest kernel of the GPU: on Hopper cuDNN's, which `varlen_attn` has from 2.15 on.
        grouped = key.shape[1] != query.shape[1]
        query, key, value = same_width(query, key, value)
        output = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        ).transpose(1, 2)
    else:
        if is_whole:
            longest = tokens
            bounds = torch.arange(
                0, len(query) * tokens + 1, tokens, dtype=torch.int32, device=query.device
            )
        # Concatenated rows: documents end within their row, so the bounds also separate rows.
        laid_out = (
            states.transpose(1, 2).flatten(0, 1).contiguous() for states in (query, key, value)
        )
        attend = kernel if has_kernel(query, dtype) else attend_each
        output = attend(*laid_out, bounds, longest, scale, window).unflatten(0, (-1, tokens))
    return output if output.shape[-1] == value_width else output[..., :value_width], None


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
    dropout = next((name for name in DROPOUTS if values.get(name)), None)
    if dropout:
        return f"dropout is not supported, and the model has {values[dropout]} (set `model.config.{dropout}: 0.0`)"
    other = next((name for name in OTHER_SCORES if values.get(name)), None)
    if other:
        return f"it does not support {config.model_type}'s `{other}`"
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


def computing_dtype(query: Tensor, key: Tensor, value: Tensor) -> torch.dtype:
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    # Rotary embeddings and norms in fp32 upcast some of them.
    return next(
        (states.dtype for states in (value, key, query) if states.dtype in HALF), query.dtype
    )


def torch_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """torch's varlen_attn; keys and values may have fewer heads."""
    query, key, value = same_width(query, key, value)
    options: dict[str, Any] = (
        {"enable_gqa": True} if SAYS_GROUPED and key.shape[1] != query.shape[1] else {}
    )
    before = -1 if window is None else window - 1  # transformers includes the token itself
    return varlen.varlen_attn(  # type: ignore[return-value]
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(before, 0),
        **options,
    )


def same_width(*states: Tensor) -> list[Tensor]:
    """Pad to the widest tensor and a multiple of eight, with zeros, which do not change scores."""
    widest = max(of.shape[-1] for of in states)
    width = widest + -widest % WIDTH_MULTIPLE
    return [of if of.shape[-1] == width else F.pad(of, (0, width - of.shape[-1])) for of in states]


def package_kernel(package: str, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    """flash-attn's kernel, called through transformers with the bounds."""
    q, k, v = (states[None] for states in same_width(query, key, value))
    return flash_attention(package, q, k, v, *others)[0]


@torch.compiler.disable  # lengths differ in each batch, so each would be compiled again
def attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend document by document; on a GPU the host waits for the bounds."""
    lengths = [length for length in bounds.diff().tolist() if length]
    grouped = key.shape[1] != query.shape[1]
    outputs = []
    for parts in zip(*(states.split(lengths) for states in (query, key, value)), strict=True):
        length = parts[0].shape[0]
        mask = None
        if window is not None and window < length:
            mask = (
                torch.ones(length, length, dtype=torch.bool, device=query.device)
                .tril()
                .triu(1 - window)
            )
        q, k, v = (states.transpose(0, 1)[None] for states in parts)
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


# --- bounds of documents ---
# Computed once per batch, and passed to the attention of every layer instead of a mask; also if several processes
# share a row (DeepSpeed Ulysses, whose attention drops the mask, so that documents would attend to each other).


# transformers' names
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
    each row is one document, since causal attention then needs no bounds. Positions are [rows, tokens].
    """
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=1) != 1
    first = begins.flatten().nonzero().flatten()
    if len(first) == len(position_ids):
        return torch.empty(0, dtype=torch.int32, device=position_ids.device)
    size = max(FEWEST_BOUNDS, 2 ** len(first).bit_length())
    bounds = torch.full(
        (size,), position_ids.numel(), dtype=torch.int32, device=position_ids.device
    )
    bounds[: len(first)] = first
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
    given = dict(keywords)
    bounds = given.pop(BOUNDS, None)
    longest = given.pop(LONGEST, None)
    positions = given.get("position_ids")
    has_mask_or_cache = any(given.get(name) is not None for name in MASK_AND_CACHE)
    if (
        has_mask_or_cache
        or positions is None
        or positions.dim() != 2
        or not model.hands_over_documents
    ):
        return arguments, given
    if bounds is None:
        inputs = [given.get("input_ids"), given.get("inputs_embeds"), *arguments]
        rows = next(len(values) for values in inputs if values is not None)
        bounds = document_bounds(positions.expand(rows, -1))
    mask = bounds.expand(1, 1, longest or positions.shape[1], -1)
    mark_dynamic(mask, [2, 3])  # one graph for any number and length of documents
    given["attention_mask"] = mask
    return arguments, given


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
        why = f"varlen does not separate documents in {model.config.model_type}'s recurrent layers"
        raise RecipeError(
            f"model.attention: {why}. Use sdpa, with `data.packing: token_budget` or `none`."
        )


def try_documents_apart(model: PreTrainedModel) -> None:
    """If the class sets `keeps_documents_apart`, compare two documents in one row with separate documents."""
    embedding = model.get_input_embeddings().get_parameter("weight")
    ids = torch.arange(1, 9, device=embedding.device).unsqueeze(0) % len(embedding)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]], device=embedding.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        parts = (slice(None), slice(0, 5), slice(5, 8))
        together, first, second = (
            model(input_ids=ids[:, p], position_ids=positions[:, p]).logits for p in parts
        )
    alone = torch.cat([first, second], dim=1)
    model.train(was_training)
    largest = float((together - alone).abs().max())
    if not largest <= TOLERANCE * float(alone.abs().max()):
        leak = f"the second document of a row depends on the first: logits differ by {largest:.2g}"
        raise RecipeError(
            f"{type(model).__name__} sets `keeps_documents_apart`, but {leak}. Fix its forward."
        )


def wants_bounds(model: nn.Module | None) -> bool:
    """Whether batches should have bounds: the hook is registered, and the model accepts further arguments."""
    whole = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(whole, PreTrainedModel) or "hands_over_documents" not in vars(
        whole.base_model
    ):
        return False
    return any(
        one.kind is one.VAR_KEYWORD for one in inspect.signature(whole.forward).parameters.values()
    )


# --- rows that several processes share ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PartOfRows:
    """Cuts micro-batches; picklable for worker processes."""

    number: int  # index of this process' part, in token order
    parts: int

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return this process' tokens, each with the next token's label, also across parts; bounds are not cut."""
        whole = add_document_bounds(batch)
        documents = {name: whole.pop(name) for name in (BOUNDS, LONGEST)}
        labels = next_tokens(whole.pop("labels"))
        whole |= {"labels": labels, "shift_labels": labels}
        cut = {
            name: rows.chunk(self.parts, dim=1)[self.number].contiguous()
            for name, rows in whole.items()
        }
        return cut | documents


def check_shared_rows(config: PreTrainedConfig, parts: int, attention: str) -> None:
    """Refuse models that would train differently on parts of rows."""
    key = "`training.parallelism_config.sp_size`"
    values = config.get_text_config().to_dict()
    if attention not in VARLEN_NAMES:
        raise RecipeError(
            f"{key}: `{attention}` does not separate documents. Write `model.attention: {VARLEN}`."
        )
    if config.model_type not in PROVEN_SHARED.split():
        why = f"{config.model_type} is not tested on parts of rows"
        raise RecipeError(f"{key}: {why}. Remove it: ZeRO-3 and FSDP2 split any model.")
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
    from deepspeed.runtime.sequence_parallel import (
        ulysses_sp,
    )  # only runs that use DeepSpeed import it

    name = attention_of(config)
    text = config.get_text_config()
    exchange = ulysses_sp.UlyssesSPAttentionHF(
        attn=AttentionInterface()[
            name
        ],  # a new object has the registered functions, without accelerate's change
        batch_size=micro_batch,
        attn_head_count=text.num_attention_heads,
        attn_head_size=vars(text).get("head_dim") or text.hidden_size // text.num_attention_heads,
        kv_head_count=text.num_key_value_heads,
        num_hidden_layers=text.num_hidden_layers,
        process_group=group,
        seq_length_is_variable=True,
        disable_in_eval=True,
    )

    def attention(module: nn.Module, query: torch.Tensor, *others: Any, **options: Any) -> Any:
        # It gathers positions in each layer, for kernels that need them; with bounds one number is enough.
        if module.training:
            options["position_ids"] = torch.zeros(1, 1, dtype=torch.int64, device=query.device)
        return exchange(module, query, *others, **options)

    ALL_ATTENTION_FUNCTIONS[name] = attention
