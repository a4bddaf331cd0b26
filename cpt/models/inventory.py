"""Inspect a model by its config: parameters, active parameters, FLOPs, and layers that mix documents."""

import inspect
import re
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cpt.hf_internals import without_zero3
from cpt.models.adapters import numbers_in
from cpt.models.families import CptGPT2Config, register_families

# Layers with state along the row mix documents, regardless of the attention mask. torch's recurrent layers do so as
# well.
RECURRENT = re.compile(
    r"mamba|(?-i:SSM)|recurrent|rglru|rwkv|xlstm|mlstm|deltanet|deltaproduct|lightning|linearattention|shortconv",
    re.IGNORECASE,
)
# Their code builds the mask without positions (transformers 5.17 to 5.23): packed documents were observed to leak with
# every attention implementation.
IGNORES_POSITIONS = """
    afmoe bert bert-generation big_bird biogpt camembert data2vec-text doge electra ernie falcon gpt_oss llama4_text
    megatron-bert moshi openai-gpt opt rembert roberta roberta-prelayernorm roc_bert xglm xlm xlm-roberta
    xlm-roberta-xl xmod
"""


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of parameters; a tied head counts once."""

    total: int
    active: int
    """Without the experts that the router does not select."""


def count_parameters(config: PreTrainedConfig) -> ParameterCount:
    return count_model_parameters(build_on_meta(config))


def count_model_parameters(model: PreTrainedModel) -> ParameterCount:
    """Count the parameters of a built model that ZeRO-3 has not partitioned."""
    numbers = {name: numbers_in(parameter) for name, parameter in model.named_parameters()}
    active = sum(number * _active_share(name, model.config) for name, number in numbers.items())
    return ParameterCount(total=sum(numbers.values()), active=round(active))


def isolates_documents(config: PreTrainedConfig) -> bool:
    """Whether restarting position_ids separate the documents of a packed row (without mask and cache).

    False for architectures with a recurrent layer or a convolution along the row (Mamba, its hybrids, linear
    attention), which would need `seq_idx` and CUDA kernels; and if `forward` takes no position_ids, or does not derive
    the mask from them. A class that resets its state for each document sets `keeps_documents_apart = True`;
    `build_model` verifies it.
    """
    if config.get_text_config().model_type in IGNORES_POSITIONS.split():
        return False
    model = build_on_meta(config)
    if runs_along_the_row(model) and not claims_to_keep_documents_apart(model):
        return False
    return "position_ids" in inspect.signature(type(model).forward).parameters


def claims_to_keep_documents_apart(model: PreTrainedModel) -> bool:
    return bool(getattr(type(model), "keeps_documents_apart", False))


def runs_along_the_row(model: nn.Module) -> bool:
    of_torch = (nn.Conv1d, nn.RNNBase, nn.RNNCellBase)
    return any(
        isinstance(module, of_torch) or RECURRENT.search(type(module).__name__)
        for module in model.modules()
    )


def rows_needed(tokenizer: PreTrainedTokenizerBase) -> int:
    """The rows that an embedding needs: the largest id plus one, not the number of tokens, as ids may have holes."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def vocabulary_size(config: PreTrainedConfig) -> int:
    """Return the number of token ids: the embedding's rows, without the padding of our GPT-2."""
    if isinstance(config, CptGPT2Config):
        return config.unpadded_vocab_size
    return config.vocab_size


def flops_per_token(model: PreTrainedModel, sequence_length: float) -> float:
    """Return the floating-point operations to train on one token, without recomputation.

    Two for each weight of a matrix in the forward pass (embedding lookups do not count), and those of attention and
    state space layers; twice that in the backward pass, half of it for weights that learn (arXiv 2001.08361, appendix
    B of arXiv 2204.02311). Frozen weights need no gradients; a backward pass ends at the first trained parameter, or
    without any (all adapters) at the first layer.
    """
    embeddings = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
    lookups = set(embeddings)
    head = model.get_output_embeddings()
    if head is not None:  # a tied head also multiplies
        lookups -= set(map(id, head.parameters()))
    gets_gradient = not any(parameter.requires_grad for parameter in model.parameters())
    forward = 0.0  # weights that multiply in the forward pass
    for_inputs = 0.0  # weights that multiply the gradient on its way to the layers before them
    trained = 0.0
    for name, parameter in model.named_parameters():  # in the order of the forward pass
        if parameter.ndim > 1 and id(parameter) not in lookups:
            weights = numbers_in(parameter) * _active_share(name, model.config)
            forward += weights
            if gets_gradient or id(parameter) in embeddings:  # a tied head comes last
                for_inputs += weights
            if parameter.requires_grad:
                trained += weights
        gets_gradient = gets_gradient or parameter.requires_grad
    other_flops = attention_flops(model.config, sequence_length) + state_space_flops(model)
    # Attention and state space layers have two products in the backward pass for each in the forward pass.
    return (
        2 * (forward + for_inputs + trained) + (1 + 2 * for_inputs / max(forward, 1)) * other_flops
    )


def attention_flops(config: PreTrainedConfig, sequence_length: float) -> float:
    """Return the FLOPs of all attention layers for one token, forward pass only, without their matrices. Scores take
    two per element of a key, their weighted mean two per element of a value. A token attends to half of the row on
    average, and at most to the sliding window."""
    text = config.get_text_config()
    values = text.to_dict()
    heads = attention_heads(text)
    if heads == 0:  # configs may use other names for sizes
        return 0.0
    width = int(values.get("head_dim") or int(text.hidden_size) // heads)
    key_width = width
    if values.get("qk_nope_head_dim"):  # latent attention
        key_width = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    value_width = int(values.get("v_head_dim") or width)
    window = min(values.get("sliding_window") or sequence_length, sequence_length)
    in_window = 0.0
    if sequence_length:
        in_window = window - window**2 / (2 * sequence_length)
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if not kinds:
        kinds = ["sliding_attention"] * int(text.num_hidden_layers)
    positions: list[float] = []  # per layer, the positions that a token attends to
    for kind in kinds:
        if "linear" in kind or not ("attention" in kind or "hybrid" in kind):
            continue
        positions.append(in_window if "sliding" in kind else sequence_length / 2)
    return 2.0 * heads * (key_width + value_width) * sum(positions)


def state_space_flops(model: PreTrainedModel) -> float:
    """Return the FLOPs of all Mamba layers for one token, forward pass only, without their matrices: seven per element
    of the state, as in Megatron-LM."""
    mixers = []
    for module in model.modules():
        if "ssm_state_size" in vars(module):
            mixers.append(vars(module))
    return 7.0 * sum(mixer["intermediate_size"] * mixer["ssm_state_size"] for mixer in mixers)


def attention_heads(config: PreTrainedConfig) -> int:
    """Return the attention heads per layer, under the config's name for them; 0 without attention."""
    text = config.get_text_config()
    name = text.attribute_map.get("num_attention_heads", "num_attention_heads")
    return int(text.to_dict().get(name) or 0)


def longest_row(config: PreTrainedConfig) -> int | None:
    """Return the config's number of positions; None if unlimited or unknown."""
    longest = config.get_text_config().to_dict().get("max_position_embeddings")
    longest = longest or config.to_dict().get("n_positions")
    if isinstance(longest, int):
        return longest
    return None


def build_on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    register_families()
    with without_zero3(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _active_share(name: str, config: PreTrainedConfig) -> float:
    if ".experts." not in name:
        return 1.0
    # transformers has three names for it; most configs accept several of them
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        experts = getattr(config, key, None)
        if experts is not None:
            return config.num_experts_per_tok / experts
    raise ValueError(f"{config.model_type} has experts, but its config lacks their number")
