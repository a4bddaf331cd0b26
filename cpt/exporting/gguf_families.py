"""Which architectures become GGUF, under which name, with which metadata, and what becomes of their tensors."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from cpt.errors import CheckpointError

Config = Any
"""A config of transformers, whose fields depend on the family."""
Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Family:
    """One architecture of transformers in GGUF.

    Attributes:
        arch: llama.cpp's name.
        unlike: says what of this config llama.cpp computes otherwise, or None.
        metadata: writes the shape.
        tensor: a tensor of transformers (its name, itself) -> those of llama.cpp, still under transformers' names.
    """

    arch: str
    unlike: Callable[[Config], str | None]
    metadata: Callable[[Any, Config], None]
    tensor: Callable[[str, torch.Tensor, Config], Tensors]


def family_of(config: PreTrainedConfig, folder: str) -> Family:
    """The family that a model is written as.

    Raises:
        CheckpointError: it is none of these, or llama.cpp computes something in it otherwise.
    """
    architecture = (config.architectures or ["an unnamed architecture"])[0]
    elsewhere = (
        f"llama.cpp's own converter knows more architectures; of a whole export (cpt export ... --output {folder}): "
        f"python llama.cpp/convert_hf_to_gguf.py {folder} --outfile model.gguf"
    )
    family = FAMILIES.get(architecture)
    if family is None:
        raise CheckpointError(f"--gguf writes {', '.join(FAMILIES)}; this is {architecture}. {elsewhere}")
    if (reason := family.unlike(config)) is not None:
        raise CheckpointError(f"--gguf cannot prove this {architecture}: {reason}. {elsewhere}")
    return family


def as_it_is(name: str, tensor: torch.Tensor, _: Config) -> Tensors:
    """No change."""
    yield name, tensor


def decoder_metadata(writer: Any, config: Config) -> None:
    """What Llama and its successors share."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    width = head_dim(config)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_vocab_size(config.vocab_size)


def head_dim(config: Config) -> int:
    """Of one attention head."""
    width: int | None = vars(config).get("head_dim")
    return width or config.hidden_size // config.num_attention_heads


def rms_metadata(writer: Any, config: Config) -> None:
    """Of families with RMS norms and all of a head's dimensions rotated."""
    decoder_metadata(writer, config)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim(config))


def unlike_rotation(config: Config) -> str | None:
    """Stretched rotary embeddings: llama.cpp knows several, transformers does not read them back, so nothing would
    prove them."""
    kind = config.rope_parameters.get("rope_type", "default")
    return None if kind == "default" else f"its rotary embeddings are stretched ({kind})"


def unlike_window(config: Config) -> str | None:
    """A sliding window that llama.cpp does not read for these families."""
    window = vars(config).get("sliding_window")
    is_used = vars(config).get("use_sliding_window", True)
    return (
        f"it attends in a sliding window of {window} tokens"
        if window and is_used and window < config.max_position_embeddings
        else None
    )


def unlike_llama(config: Config) -> str | None:
    """Of Llama and Mistral."""
    fields = vars(config)
    if fields.get("attention_bias") or fields.get("mlp_bias"):
        return "it has biases, which Llama has not in llama.cpp's readers"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    return unlike_rotation(config) or unlike_window(config)


def llama_tensor(name: str, tensor: torch.Tensor, config: Config) -> Tensors:
    """llama.cpp rotates neighbouring dimensions (0, 1), (2, 3), ...; transformers the two halves of a head: so rows
    change places."""
    if name.endswith((".q_proj.weight", ".k_proj.weight")):
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        halves = tensor.unflatten(0, (heads, 2, -1))  # head, half, dimension of the half, input
        tensor = halves.transpose(1, 2).flatten(0, 2)
    yield name, tensor


def unlike_qwen(config: Config) -> str | None:
    """Of Qwen2 and Qwen3."""
    if vars(config).get("attention_bias"):
        return "its attention has biases everywhere"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}"
    return unlike_rotation(config) or unlike_window(config)


def unlike_qwen3_moe(config: Config) -> str | None:
    """llama.cpp has experts in every layer, and normalises their weights."""
    if not config.norm_topk_prob:
        return "the weights of its chosen experts are not normalised (norm_topk_prob: false)"
    if config.decoder_sparse_step != 1 or config.mlp_only_layers:
        return "some of its layers have no experts"
    return unlike_qwen(config)


def qwen3_moe_metadata(writer: Any, config: Config) -> None:
    """With the experts."""
    rms_metadata(writer, config)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def qwen3_moe_tensor(name: str, tensor: torch.Tensor, _: Config) -> Tensors:
    """transformers has the experts' gates and ups in one tensor [experts, 2 * width, input]."""
    if name.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        yield name.replace("gate_up_proj", "gate_proj.weight"), gate
        yield name.replace("gate_up_proj", "up_proj.weight"), up
    else:
        yield (f"{name}.weight" if name.endswith(".experts.down_proj") else name), tensor


def unlike_gpt2(config: Config) -> str | None:
    """llama.cpp has GPT-2's own attention scale and activation only."""
    if config.scale_attn_by_inverse_layer_idx or not config.scale_attn_weights:
        return "its attention is scaled otherwise than GPT-2's"
    return (
        None
        if config.activation_function in ("gelu_new", "gelu_pytorch_tanh")
        else f"its activation is {config.activation_function}"
    )


def gpt2_metadata(writer: Any, config: Config) -> None:
    """Learned positions, so none of the rotation's keys."""
    writer.add_context_length(config.n_positions)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner or 4 * config.n_embd)
    writer.add_head_count(config.n_head)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)


def gpt2_tensor(name: str, tensor: torch.Tensor, _: Config) -> Tensors:
    """Its layers hold [input, output], all others [output, input]."""
    is_layer = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
    yield name, tensor.t() if is_layer else tensor


def unlike_nemotron(config: Config) -> str | None:
    """Of Nemotron-4 and Minitron."""
    if config.attention_bias or config.mlp_bias:
        return "it has biases"
    if config.hidden_act != "relu2":
        return f"its activation is {config.hidden_act}"
    return unlike_rotation(config)


def nemotron_metadata(writer: Any, config: Config) -> None:
    """A part of each head is rotated."""
    decoder_metadata(writer, config)
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * head_dim(config)))


def nemotron_tensor(name: str, tensor: torch.Tensor, _: Config) -> Tensors:
    """Its norms multiply by 1 + weight, llama.cpp's by the weight."""
    yield name, tensor.float() + 1 if name.endswith("norm.weight") else tensor


LLAMA = Family("llama", unlike_llama, rms_metadata, llama_tensor)
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": Family("qwen2", unlike_qwen, rms_metadata, as_it_is),
    "Qwen3ForCausalLM": Family("qwen3", unlike_qwen, rms_metadata, as_it_is),
    "Qwen3MoeForCausalLM": Family("qwen3moe", unlike_qwen3_moe, qwen3_moe_metadata, qwen3_moe_tensor),
    "GPT2LMHeadModel": Family("gpt2", unlike_gpt2, gpt2_metadata, gpt2_tensor),
    "NemotronForCausalLM": Family("nemotron", unlike_nemotron, nemotron_metadata, nemotron_tensor),
}
