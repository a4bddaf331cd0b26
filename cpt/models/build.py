"""Build the model to train from the recipe's `model:` section, including scoring models and ZeRO-3."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors import SafetensorError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.integrations import is_deepspeed_zero3_enabled

from cpt.distributed import is_main_process, main_process_decides, main_process_first
from cpt.errors import CheckpointError, RecipeError
from cpt.hf_internals import attention_of, without_zero3
from cpt.models.adapters import add_lora, check_quantization, prepare_quantized, quantization_of
from cpt.models.attention import (
    VARLEN,
    VARLEN_NAMES,
    choose_attention,
    keep_documents_apart,
    try_documents_apart,
    why_not_by_bounds,
)
from cpt.models.config import STATE_DICTS, load_config, read_config
from cpt.models.families import CptGPT2Config, pad_vocabulary
from cpt.models.freezing import freeze_others
from cpt.models.fused_loss import balance_weight
from cpt.models.inventory import (
    attention_heads,
    claims_to_keep_documents_apart,
    count_model_parameters,
    rows_needed,
    vocabulary_size,
)
from cpt.models.new_rows import (
    new_ids,
    num_new_rows,
    refuse_untrained_rows,
    train_only_rows,
)
from cpt.recipe.paths import is_local
from cpt.recipe.schema import NEW_ROWS, Model

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROWS_MULTIPLE = 64  # grown vocabularies are rounded up to it, for tensor cores
MOST_LISTED = 5  # names of tensors in a message


def build_model(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 42,
    dtype: torch.dtype = torch.float32,
    mixed_precision: bool = False,
    packed: bool = False,
    is_sharded_later: bool = False,
) -> PreTrainedModel | PeftModel:
    """Build the model, from weights or from scratch, ready for training.

    Args:
        seed: of new weights (from scratch, grown rows, adapters); the same under every launcher and ZeRO-3.
        dtype: dtype for `dtype: auto`.
        mixed_precision: the run computes in bf16 or fp16 even if the weights are fp32.
        packed: rows have no mask: only positions separate documents and padding.
        is_sharded_later: only the main process needs the weights; FSDP2 sends each process its part of them.

    Raises:
        RecipeError: the section contradicts itself, the weights or the tokenizer.
        CheckpointError: weights are missing or damaged.
        ResourceError: the Hub, a required package or a GPU is not available.
    """
    config = load_config(model)
    vocabulary = vocabulary_size(config)
    needed = rows_needed(tokenizer)
    if needed > vocabulary and not model.resize_embeddings:
        sizes = (
            f"the tokenizer has ids up to {needed - 1}, the model's vocabulary {vocabulary} rows"
        )
        raise RecipeError(
            f"{sizes}. Set `model.resize_embeddings: true`, or `tokenizer.path` to the model's own."
        )
    trained_ids: list[int] | None = None
    if model.train_only == NEW_ROWS:
        trained_ids = new_ids(Path(str(model.path)).expanduser())
    # Training never reuses keys and values, and a cache would not separate documents.
    config.use_cache = False
    weight_dtype = DTYPES.get(model.dtype, dtype)
    zero3 = is_deepspeed_zero3_enabled()
    check_quantization(model.lora, zero3=zero3)
    half_precision = mixed_precision or weight_dtype != torch.float32
    attention = _attention(model, config, half_precision=half_precision, packed=packed)
    build_whole = partial(_build_whole, model, config, tokenizer, attention, weight_dtype)
    builds_once = zero3 or is_sharded_later
    with torch.random.fork_rng(devices=[]):  # weights do not advance the run's random numbers
        torch.manual_seed(seed)
        base = build_once(build_whole, model.trust_remote_code) if builds_once else build_whole()
        if model.dtype != "auto" and base.dtype != DTYPES[model.dtype]:
            raise RecipeError(
                f"model.dtype is {model.dtype}, but DeepSpeed has {base.dtype}. Use `dtype: auto`."
            )
        torch.manual_seed(seed)
        if attention in VARLEN_NAMES:
            keep_documents_apart(base)
        if packed and claims_to_keep_documents_apart(base) and not zero3:
            if builds_once:
                main_process_decides(partial(try_documents_apart, base))
            else:
                try_documents_apart(base)
        ready = base if model.lora is None else add_lora(base, model.lora)
    if model.train_only is not None:
        _train_only(base, model.train_only)
    if trained_ids is not None:
        train_only_rows(base, trained_ids)
    else:
        num_new = num_new_rows(model, needed, vocabulary)
        if num_new:
            refuse_untrained_rows(ready, num_new)
    has_router_logits = "output_router_logits" in config.get_text_config().to_dict()
    if has_router_logits and balance_weight(base):
        ready.register_forward_pre_hook(_balance_in_training, with_kwargs=True)
    return ready


def _train_only(model: PreTrainedModel, patterns: str | Sequence[str]) -> None:
    for tied in freeze_others(model, patterns):
        logger.warning(tied)
    is_trained = [parameter.requires_grad for parameter in model.parameters()]
    logger.info("model.train_only: %d of %d tensors are trained", sum(is_trained), len(is_trained))


def _balance_in_training(
    model: nn.Module, arguments: Any, keywords: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """transformers adds the balance loss to all router logits; evaluation needs only the cross entropy."""
    return arguments, {"output_router_logits": model.training} | keywords


def _build_whole(
    model: Model,
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    attention: str | None,
    dtype: torch.dtype,
) -> PreTrainedModel:
    if model.from_scratch:
        # Drawn in fp32 and then rounded: the same weights in every dtype.
        built = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32,
            attn_implementation=attention,
            trust_remote_code=model.trust_remote_code,
        ).to(dtype)
        built.config.dtype = dtype
        # New weights have not learned special tokens, so use the tokenizer's, not the published config's.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(built.config, name, getattr(tokenizer, name))
            if built.generation_config is not None:
                setattr(built.generation_config, name, getattr(tokenizer, name))
    else:
        built = load_weights(model, config, attention, dtype)
    if model.parameters is not None:
        parameters = count_model_parameters(built).total
        if parameters != model.parameters:
            raise RecipeError(
                f"model.parameters says {model.parameters:,}, the built model has {parameters:,}. Correct it."
            )
    needed = rows_needed(tokenizer)
    if needed > vocabulary_size(config):
        built.resize_token_embeddings(needed, pad_to_multiple_of=ROWS_MULTIPLE)
        logger.info(
            "vocabulary grown to %d rows; new rows start near the mean of the old ones", needed
        )
    return built


def _attention(
    model: Model, config: PreTrainedConfig, *, half_precision: bool, packed: bool
) -> str | None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # its class is in the weights' repository
        if packed and (model.attention == VARLEN or "flash" in model.attention):
            reason = "the model's own code may mix documents of packed rows"
            raise RecipeError(
                f"model.attention: {model.attention}: {reason}. Use sdpa, or `packing: token_budget`."
            )
        if model.attention == "auto":
            return None
        return model.attention
    model_class = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    needs: dict[str, Any] = {"config": config, "half_precision": half_precision, "packed": packed}
    attention = choose_attention(model.attention, model_class, **needs)
    note = ""
    if model.attention == "auto":
        reason = why_not_by_bounds(model_class, **needs) or "packed rows in half precision"
        note = f" (auto: {reason})"
    if attention == VARLEN and not torch.cuda.is_available():
        note += " by torch's SDPA, one document after the other (its kernel needs a GPU)"
    if model.attention != "auto" or attention_heads(config):
        logger.info("attention: %s%s", attention, note)
    return attention


def load_weights(
    model: Model, config: PreTrainedConfig, attention: str | None, dtype: torch.dtype | str
) -> PreTrainedModel:
    """Load a model and all of its weights from a folder or Hub id; dtype "auto" is that of the files."""
    path = str(model.path)
    if is_local(path):
        path = str(Path(path).expanduser())
    options: dict[str, Any] = {"config": config, "dtype": dtype, "attn_implementation": attention}
    options["output_loading_info"] = True
    revision = model.revision or "main"
    try:
        quantization = quantization_of(model.lora)
        if quantization is not None:
            options["quantization_config"] = quantization.config(dtype)
        state_dict = converted_weights(model, config, path, revision)
        if state_dict:
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            loaded = model_class.from_pretrained(None, state_dict=state_dict, **options)
        else:
            options |= {"revision": revision, "trust_remote_code": model.trust_remote_code}
            loaded = AutoModelForCausalLM.from_pretrained(path, **options)
    except (OSError, SafetensorError, UnpicklingError, EOFError, RuntimeError) as problem:
        raise CheckpointError(
            f"model.path: weights of {path} cannot be loaded: {' '.join(str(problem).split())[:600]} Copy it again."
        ) from problem
    built, info = cast(tuple[PreTrainedModel, dict[str, Any]], loaded)
    if quantization is not None:
        prepare_quantized(built)
    missing = sorted(info["missing_keys"])
    if missing:
        listed = ", ".join(missing[:MOST_LISTED])
        if len(missing) > MOST_LISTED:
            listed += ", ..."
        raise CheckpointError(
            f"model.path: {path} lacks {len(missing)} of its tensors ({listed}). Copy it again."
        )
    unexpected = sorted(info["unexpected_keys"])
    if unexpected:
        listed = ", ".join(unexpected[:MOST_LISTED])
        logger.warning(
            "%s: %d tensors belong to no part of the model: %s", path, len(unexpected), listed
        )
    return built


def converted_weights(
    model: Model, config: PreTrainedConfig, path: str, revision: str
) -> Mapping[str, torch.Tensor] | None:
    """Return weights that `from_pretrained` would not read into a model of `config`; None if it does."""
    if Path(path).suffix in STATE_DICTS:
        saved: Mapping[str, torch.Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        return saved
    if model.config is None:
        return None
    published_config = read_config(model)
    if published_config.model_type == config.model_type:
        return None
    if published_config.get_text_config().model_type == config.model_type:
        # The language model of weights that also read images.
        published = AutoModelForCausalLM.from_pretrained(path, revision=revision)
        tensors = published.get_decoder().state_dict()
        state_dict = {f"model.{name}": tensor for name, tensor in tensors.items()}
        state_dict["lm_head.weight"] = published.get_output_embeddings().weight
        return state_dict
    if isinstance(config, CptGPT2Config):  # a published GPT-2, whose vocabulary must be padded
        published = AutoModelForCausalLM.from_pretrained(path, revision=revision)
        return pad_vocabulary(published.state_dict(), config.vocab_size)
    return None


# --- scoring models --------------------------------------------------------------------------------------------------

HEAD = "score"


def check_scoring(config: PreTrainedConfig) -> None:
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise RecipeError(
            f"`stage` reward: no sequence classifier for `{config.model_type}`. Use llama or qwen3."
        )


def scoring_model(
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 42,
    dtype: torch.dtype = torch.float32,
    **options: bool,
) -> PreTrainedModel | PeftModel:
    """The recipe's model with a head of one output, drawn from the seed and read at a text's last token."""
    without_adapters = model.model_copy(update={"lora": None})
    causal = build_model(without_adapters, tokenizer, seed=seed, dtype=dtype, **options)
    assert isinstance(causal, PreTrainedModel), "without adapters"
    config = causal.config
    check_scoring(config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id
    model_class: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    # Its own body is replaced, so it needs no memory.
    with without_zero3(), torch.device("meta"):
        scoring: PreTrainedModel = model_class(config)
    setattr(scoring, scoring.base_model_prefix, getattr(causal, causal.base_model_prefix))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(scoring.get_submodule(HEAD).in_features, 1, bias=False)  # type: ignore[arg-type]
        nn.init.normal_(head.weight, std=config.get_text_config().initializer_range)
        setattr(scoring, HEAD, head.to(dtype))
        if model.lora is None:
            return scoring
        torch.manual_seed(seed)
        return add_lora(scoring, {**model.lora, "task_type": "SEQ_CLS", "modules_to_save": [HEAD]})


def build_once(
    build_whole: Callable[[], PreTrainedModel], trust_remote_code: bool
) -> PreTrainedModel:
    """Build the whole model on the main process. Under ZeRO-3, return this process's part of it; under FSDP2, other
    processes get unused memory until they receive their shards (`cpt.training.engine`).

    transformers 5.23 draws other random weights when it partitions for ZeRO-3, and reads all weights in each process
    for FSDP2. Built whole, a seed means the same weights under every launcher, for the memory of one copy on the main
    process.
    """
    import torch.distributed as dist

    def build_on_main_process() -> PreTrainedModel | None:
        if is_main_process():
            return build_whole()
        return None

    zero3 = is_deepspeed_zero3_enabled()
    with without_zero3():
        built = main_process_first(build_on_main_process)
    shared: list[PreTrainedConfig | torch.dtype | str | None] = [None, None, None]
    tensors: dict[str, torch.Tensor] = {}
    if built is not None:
        shared = [built.config, built.dtype, attention_of(built.config)]
        tensors = dict(built.named_parameters()) | dict(built.named_buffers())
    dist.broadcast_object_list(shared, src=0)
    config, dtype, attention = shared
    if built is not None and not zero3:
        model = built
    else:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(
                config,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
            )
    with torch.no_grad():
        if zero3:
            copy_to_parts(tensors, model)
        else:
            model.tie_weights()
        for name, buffer in model.named_buffers():
            if tensors:
                buffer.copy_(tensors[name])
            dist.broadcast(buffer, src=0)
    if built is not None and built.generation_config is not None:
        model.generation_config = built.generation_config
    return model


def copy_to_parts(tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> None:
    """Copy the main process's weights to ZeRO-3's parts; `tensors` are empty on other processes."""
    import deepspeed

    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if tensors:
                parameter.copy_(tensors[name])
