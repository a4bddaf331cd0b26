"""Adapters through peft: add LoRA, or another mergeable method, to a model, over base weights in 4 bit (QLoRA, arXiv
2305.14314) or 8 bit (LLM.int8(), arXiv 2208.07339) if the recipe says so, and merge adapters into the weights."""

import copy
import json
import logging
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import (
    PeftConfig,
    PeftModel,
    PeftType,
    get_peft_config,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
)
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.ln_tuning.layer import LNTuningLayer
from peft.utils import CONFIG_NAME, ModulesToSaveWrapper
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.pytorch_utils import Conv1D

from cpt.errors import CheckpointError, RecipeError, ResourceError, install_line
from cpt.plugins import did_you_mean
from cpt.recipe.huggingface_keys import LORA, PEFT_METHODS, method_of
from cpt.recipe.schema import LORA_QUANTIZATION

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0}
"""For LoRA; other methods use peft's."""
PRESETS: dict[str, dict[str, Any]] = {
    # Continued pre-training needs a high rank on all layers (arXiv 2405.09673), and thus the rank-stabilized scale
    # (arXiv 2312.03732).
    "cpt": {"r": 128, "lora_alpha": 32, "use_rslora": True},
}
# peft refuses these layers: Mamba's kernels read their weights directly and would ignore the adapter.
MAMBA_EXCLUDED = ("out_proj", "conv1d")
OURS = ("preset", "method", *LORA_QUANTIZATION)  # keys of `model.lora` that peft does not have
# Values of `init_lora_weights`: these subtract the adapter from the base weights, runs do not support the others.
START_IN_THE_BASE = ("pissa", "olora", "mica")
UNSUPPORTED_STARTS = {
    **dict.fromkeys(("eva", "corda", "lora_ga"), "needs data before the run"),
    "loftq": "changes the base weights",
}
# Not for all linear layers: without `target_modules` peft chooses by the architecture.
CHOSEN_BY_PEFT = ("ln_tuning", "ia3")
ALL_LINEAR = "all-linear"


def check_lora_options(options: Mapping[str, Any], *, zero3: bool = False) -> None:
    """Refuse initializations that runs do not support. The recipe has already checked the method and its keys."""
    if options.get("alora_invocation_tokens"):
        raise RecipeError(
            "`model.lora.alora_invocation_tokens` adapts parts of texts, so it cannot merge. Remove it."
        )
    start = str(options.get("init_lora_weights")).partition("_niter")[0]
    if start in UNSUPPORTED_STARTS:
        raise RecipeError(
            f"`model.lora.init_lora_weights: {start}` {UNSUPPORTED_STARTS[start]}. Remove it."
        )
    if quantization_of(options) is not None and start in START_IN_THE_BASE:
        # It would subtract the adapter from other weights than those it is merged into.
        raise RecipeError(
            f"`model.lora.init_lora_weights: {start}` does not work with `quantize`. Remove one."
        )
    reader = reader_of_weights(options)
    if zero3 and reader is not None:
        raise RecipeError(
            f"`model.lora.{reader}` needs whole weights. Use ZeRO-2, or plain `method: lora`."
        )


def reader_of_weights(options: Mapping[str, Any]) -> str | None:
    """The option that makes adapters start from the base weights; None for plain LoRA, or without adapters."""
    start = str(options.get("init_lora_weights")).partition("_niter")[0]
    if start in START_IN_THE_BASE:
        return f"init_lora_weights: {start}"
    if options and method_of(options) != LORA:
        return f"method: {method_of(options)}"
    return None


def check_lora(model: PreTrainedModel, options: Mapping[str, Any]) -> None:
    """Refuse adapters that do not fit the model, which may be on the meta device."""
    layers = last_names(name for name, _ in adaptable(model))
    if not layers:
        raise RecipeError(
            f"`model.lora`: {model.config.model_type} lacks linear layers to adapt. Write `lora: null`."
        )
    peft_options = lora_options(model, options)
    config_for(peft_options, options)
    if options.get("lora_bias"):
        for name, layer in adaptable(model):
            if dict(layer.named_parameters()).get("bias") is None:
                raise RecipeError(f"`model.lora.lora_bias`: {name} lacks a bias. Remove it.")
    modules = {name: module for name, module in model.named_modules() if name}
    head = model.get_output_embeddings()
    ends = last_names(
        name
        for name, module in modules.items()
        if module is head or isinstance(module, nn.Embedding)
    )
    for key, names in (("target_modules", layers), ("modules_to_save", [*ends, *layers])):
        for selector, pattern in patterns_of(peft_options.get(key)):
            if not any(re.fullmatch(pattern, name) for name in modules):
                raise RecipeError(
                    f"`model.lora.{key}`: {model.config.model_type} has no module `{selector}`."
                    f"{did_you_mean(selector, names)} Modules: {', '.join(names)}."
                )
    refuse_tied_ends(model, peft_options)


def patterns_of(selectors: Any) -> Iterator[tuple[str, str]]:
    """Each part of `target_modules` or `modules_to_save`, with the pattern of the module names it selects."""
    if selectors == ALL_LINEAR or selectors is None:
        return
    if isinstance(selectors, str):
        yield selectors, selectors  # a regular expression of whole names
        return
    for selector in selectors:
        yield selector, rf"(.*\.)?{re.escape(selector)}"


def refuse_tied_ends(model: PreTrainedModel, peft_options: Mapping[str, Any]) -> None:
    """Refuse adapters that train only one of two tied layers: an exported model has one matrix for both."""
    if not is_tied(model) or peft_options.get("ensure_weight_tying"):
        return
    ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    paths = []
    for name, module in model.named_modules():
        if id(module) in ends:
            paths.append(name)
    for key in ("target_modules", "modules_to_save"):
        for selector, pattern in patterns_of(peft_options.get(key)):
            if any(re.fullmatch(pattern, path) for path in paths):
                raise RecipeError(
                    f"`model.lora.{key}`: `{selector}` is one of two tied layers ({' and '.join(paths)}), which are"
                    " one matrix in the exported model. Remove it, or train both: `lora: cpt`."
                )


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the embedding and the head are one matrix."""
    return bool(model.config.get_text_config().tie_word_embeddings)


def count_lora_parameters(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    copied: nn.Module = copy.deepcopy(model)
    copied.to_empty(device="meta")
    assert isinstance(copied, PreTrainedModel)
    # The adapters of a large model take seconds to initialize; some other methods compute with their values.
    with torch.device("meta") if method_of(options) == LORA else nullcontext():
        adapted = put_adapters(copied, options)
    return sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


def add_lora(model: PreTrainedModel, options: Mapping[str, Any]) -> PeftModel:
    """Freeze the model and add adapters, in fp32 regardless of the model's dtype, like all other trained weights."""
    check_lora_options(options, zero3=is_deepspeed_zero3_enabled())
    # The embedding is frozen: without this, gradient checkpointing finds no input that requires a gradient, and
    # adapters learn nothing.
    model.enable_input_require_grads()
    adapted = put_adapters(model, options)
    if not is_deepspeed_zero3_enabled():  # DeepSpeed keeps fp32 copies of trained weights
        train_copies_in_fp32(adapted, model.dtype)
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and parameter.dtype != torch.float32:
                raise RecipeError(
                    f"`model.lora` trains {name} in half precision. Remove `bias`, or use float32."
                )
    method = method_of(options)
    trained, total = adapted.get_nb_trainable_parameters()
    if trained == 0:
        raise RecipeError(f"`model.lora`: {method} with these options selects no layers to train.")
    share = f"{trained:,} of {total:,} parameters are trained ({100 * trained / total:.2f} %)"
    logger.info("adapters (%s): %s", method, share)
    return adapted


def put_adapters(model: PreTrainedModel, options: Mapping[str, Any]) -> PeftModel:
    config = config_for(lora_options(model, options), options)
    try:
        # peft uses deprecated names of transformers
        with warnings.catch_warnings(action="ignore", category=FutureWarning):
            return get_peft_model(model, config, autocast_adapter_dtype=True)
    except (ValueError, TypeError, NotImplementedError) as problem:
        raise RecipeError(f"model.lora: {problem}") from problem
    except AttributeError as problem:
        reader = reader_of_weights(options)
        if reader is None:
            raise
        # peft reads the one weight of a layer; fused experts have several
        raise RecipeError(
            f"`model.lora.{reader}` reads the weights of plain layers, and {model.config.model_type} has others:"
            f" {problem}. Remove it."
        ) from problem


def config_for(peft_options: Mapping[str, Any], options: Mapping[str, Any]) -> PeftConfig:
    fixed = {"peft_type": method_of(options).upper(), "task_type": "CAUSAL_LM"}
    try:
        return get_peft_config({**fixed, **peft_options})
    except (ValueError, TypeError) as problem:
        raise RecipeError(f"model.lora: {problem}") from problem


def lora_options(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the method's config: our defaults, then the preset's, then the recipe's."""
    method = method_of(options)
    preset = options.get("preset")
    peft_options: dict[str, Any] = {}
    if method == LORA:
        peft_options = DEFAULTS | PRESETS.get(str(preset), {})
    for key, value in options.items():
        if key not in OURS:
            peft_options[key] = value
    if method not in CHOSEN_BY_PEFT:
        peft_options.setdefault("target_modules", ALL_LINEAR)
    is_mamba = any(isinstance(module, nn.Conv1d) for module in model.modules())
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method.upper())]
    can_exclude = "exclude_modules" in config_class.__dataclass_fields__
    if peft_options.get("target_modules") == ALL_LINEAR and is_mamba and can_exclude:
        peft_options.setdefault("exclude_modules", list(MAMBA_EXCLUDED))
    if preset is not None and "modules_to_save" not in options:
        peft_options["modules_to_save"] = names_of_ends(model)
        peft_options.setdefault("ensure_weight_tying", is_tied(model))
    return peft_options


def names_of_ends(model: PreTrainedModel) -> list[str]:
    """Return the names of the embedding and of an untied head, which a preset trains fully."""
    ends = [model.get_input_embeddings()]
    if not is_tied(model):
        ends.append(model.get_output_embeddings())
    paths = {id(module): name for name, module in model.named_modules()}
    names = [paths[id(module)].rpartition(".")[2] for module in ends]
    if is_tied(model) and names[0] not in EMBEDDING_LAYER_NAMES:
        raise RecipeError(
            f"`model.lora`: {model.config.model_type} ties its head to the embedding `{names[0]}`. Write"
            " `lora: {r: 128, lora_alpha: 32, use_rslora: true}`, or `null`."
        )
    return names


def train_copies_in_fp32(adapted: PeftModel, base_dtype: torch.dtype) -> None:
    """Make fully trained layers fp32, because small steps are lost in bfloat16. The outputs of embeddings and norms
    keep the dtype of the surrounding layers; a head accepts any."""
    for module in adapted.modules():
        copies: Iterable[nn.Module] = ()
        if isinstance(module, ModulesToSaveWrapper):
            copies = module.modules_to_save.values()
        elif isinstance(module, LNTuningLayer):
            copies = module.ln_tuning_layers.values()
        for copied in copies:
            copied.float()
            if base_dtype == torch.float32:
                continue
            if isinstance(copied, nn.Linear):
                copied.register_forward_pre_hook(inputs_as_weight)
            else:
                copied.register_forward_hook(lambda _, __, output: output.to(base_dtype))


def inputs_as_weight(layer: nn.Linear, inputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    return tuple(tensor.to(layer.weight.dtype) for tensor in inputs)


def load_adapter(base: PreTrainedModel, adapter: Path) -> PeftModel:
    """Load the saved adapter onto the base; CheckpointError if its layers or shapes do not match the base."""
    name = json.loads((adapter / CONFIG_NAME).read_text()).get("base_model_name_or_path")
    refusal = f"{adapter} is an adapter for another base ({name}), not for {base.name_or_path}"
    try:
        with warnings.catch_warnings():  # peft uses a name deprecated by transformers
            warnings.filterwarnings(
                "ignore", r".*gradient_checkpointing` is deprecated.*", FutureWarning
            )
            adapted = PeftModel.from_pretrained(base, str(adapter))
        saved = load_peft_weights(str(adapter), device="cpu")
    except (RuntimeError, ValueError, OSError) as problem:
        raise CheckpointError(f"{refusal}: {' '.join(str(problem).split())[:300]}") from problem
    loaded = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    # peft only warns of tensors of the adapter that differ, and leaves these layers unchanged.
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[adapted.active_peft_config.peft_type]
    differing = [name for name in saved.keys() ^ loaded.keys() if prefix in name]
    if differing:
        raise CheckpointError(
            f"{refusal}: {len(differing)} of its tensors differ, such as {min(differing)}."
        )
    return adapted


def merge_lora(model: PeftModel) -> PreTrainedModel:
    """Return the plain model with the adapters merged into its weights; refuse adapters with NaN."""
    try:
        return model.merge_and_unload(safe_merge=True)  # type: ignore[no-any-return]
    except (NotImplementedError, ValueError) as problem:  # ValueError: NaN
        raise CheckpointError(
            f"peft cannot merge {model.active_peft_config.peft_type.value}: {problem}"
        ) from problem


def check_mergeable(peft_type: str) -> None:
    if peft_type.lower() not in (*PEFT_METHODS, "adalora"):
        raise CheckpointError(
            f"an adapter of {peft_type} cannot be merged into its base. Serve both with peft."
        )


def adaptable(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear layers with their names, except the head."""
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            yield name, module


def last_names(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


# --- base weights in 4 or 8 bit, by bitsandbytes --------------------------------------------------------------------

BLOCK = 64
BLOCK_OF_SCALES = 256
# Per weight, by whether the scales are quantized too.
BYTES_OF_4_BIT = {
    False: 0.5 + 4 / BLOCK,  # a scale in fp32 for each block
    # a scale in 8 bit for each block, and one in fp32 for 256 of those
    True: 0.5 + 1 / BLOCK + 4 / (BLOCK * BLOCK_OF_SCALES),
}


@dataclass(frozen=True)
class Quantization:
    kind: str
    """nf4: the quantiles of a normal distribution, fp4: floating-point numbers, int8: integers."""
    double: bool
    """Whether the scales are quantized too."""

    @property
    def bits(self) -> int:
        if self.kind == "int8":
            return 8
        return 4

    @property
    def bytes_per_weight(self) -> float:
        if self.bits == 8:
            return 1.0  # without one scale for each row
        return BYTES_OF_4_BIT[self.double]

    def config(self, compute: torch.dtype | str) -> BitsAndBytesConfig:
        if self.bits == 8:
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.kind,
            bnb_4bit_use_double_quant=self.double,
            bnb_4bit_compute_dtype=compute,
        )


def quantization_of(lora: Mapping[str, Any] | None) -> Quantization | None:
    if lora is None:
        return None
    kind = lora.get("quantize")
    if "double_quantize" in lora and kind not in ("nf4", "fp4"):
        raise RecipeError(
            "`model.lora.double_quantize` has no effect without `model.lora.quantize: nf4`."
        )
    if kind is None:
        return None
    return Quantization(kind, kind != "int8" and bool(lora.get("double_quantize", True)))


def check_quantization(lora: Mapping[str, Any] | None, *, zero3: bool) -> None:
    if quantization_of(lora) is None:
        return
    if zero3:
        raise RecipeError(
            "`model.lora.quantize`: ZeRO-3 cannot shard quantized weights. Remove `training.deepspeed`."
        )
    require_bitsandbytes("`model.lora.quantize`")


def require_bitsandbytes(key: str) -> None:
    if find_spec("bitsandbytes") is None:
        raise ResourceError(f"{key} needs bitsandbytes. Install it: {install_line('bitsandbytes')}")


def prepare_quantized(model: nn.Module) -> None:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU with AVX-512 and bfloat16: the other layout fails if
    inputs are not a multiple of a block, and makes the gradients of later steps wrong. Keep it from warning in each
    8-bit product that it rounds bfloat16 inputs to float16."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for module in model.modules():
        if "support_avx512bf16_for_cpu" in vars(module):
            vars(module)["support_avx512bf16_for_cpu"] = False


def numbers_in(parameter: torch.Tensor) -> int:
    """Return the number of weights in a parameter; a 4-bit parameter has two per byte."""
    if isinstance(parameter, nn.Parameter):
        state = vars(parameter).get("quant_state")
        if state is not None:
            return torch.Size(state.shape).numel()
    return parameter.numel()
