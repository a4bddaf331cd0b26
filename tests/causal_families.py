"""Tiny models of the causal families of transformers, and of ours, made from the names in their configs."""

import dataclasses
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cpt.models.families import FAMILIES as OWN_FAMILIES
from cpt.models.families import register_families

register_families()
FAMILIES = (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OWN_FAMILIES)
MOST_WEIGHTS = 500_000

SIZES: dict[int, str] = {
    # Widths
    32: "hidden_size d_model n_embd dim embedding_size emb_dim embedding_dim lru_width qk_dim",
    48: "intermediate_size ffn_dim d_ff n_inner ffn_hidden_size dim_ff d_inner dff encoder_ffn_dim decoder_ffn_dim "
    "feed_forward_size dense_intermediate_size",
    # Heads, experts, layers
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_blocks num_key_value_heads "
    "num_experts_per_tok moe_k moe_topk num_attention_groups linear_num_key_heads swa_num_key_value_heads o_groups "
    "num_global_key_value_heads zero_expert_num index_n_heads index_topk_blocks eos_token_id sep_token_id "
    "expand_ratio",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "n_routed_experts num_local_experts linear_num_value_heads linear_conv_kernel_dim swa_num_attention_heads "
    "mamba_dt_rank time_step_rank rotary_dim",
    8: "head_dim attention_head_size d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_num_heads mamba_head_dim "
    "mamba_d_head mamba_n_heads mamba_d_state ssm_state_size state_size chunk_size mamba_chunk_size "
    "hidden_size_per_layer_input global_head_dim linear_head_dim swa_head_dim shape_embed_dim "
    "pronunciation_embed_dim linear_key_head_dim linear_value_head_dim index_head_dim index_topk",
    16: "moe_intermediate_size shared_expert_intermediate_size kv_lora_rank q_lora_rank o_lora_rank "
    "attention_window_size sliding_window expert_ffn_hidden_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size shared_experts_intermediate_size shape_vocab_size "
    "pronunciation_vocab_size expert_intermediate_size",
    64: "max_position_embeddings n_positions max_sequence_length n_ctx max_seq_len mamba_d_ssm",
    96: "vocab_size vocab_size_per_layer_input",
    90: "unpadded_vocab_size",
    1: "n_shared_experts n_group num_expert_group topk_group num_groups first_k_dense_replace mamba_n_groups n_groups "
    "bos_token_id decoder_start_token_id",
    0: "pad_token_id dropout",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
OTHERWISE: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"layer_types": ["sliding_attention", "sliding_attention"]},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v4": {"num_key_value_heads": 1},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "inkling2_text": {"d_rel": 8, "rel_extent": 16, "sliding_window_size": 16},
    "inkling_text": {"d_rel": 8, "rel_extent": 16, "sliding_window_size": 16},
    "jetmoe": {"kv_channels": 8},
    "kimi_linear": {"linear_num_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "num_buckets": 2,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["mamba", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}


def small_config(family: str, **changes: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[family](**small_values(family, **changes))


def small_values(family: str, **changes: Any) -> dict[str, Any]:
    """What a config of the family is made from."""
    kind = CONFIG_MAPPING[family]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for name, size in SMALL.items():
        own_name = name if name in fields else kind.attribute_map.get(name)
        if own_name in fields:
            values.setdefault(own_name, size)
    if "qk_rope_head_dim" in fields:  # latent attention has as many heads of keys as of queries
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name, default in fields.items():
        if isinstance(default, float) and ("drop" in name or name.endswith("_p")):
            values[name] = 0.0
    return {**values, **OTHERWISE.get(family, {}), **changes}


def small_model(family: str, **changes: Any) -> PreTrainedModel:
    """Build the family's model with random weights.

    Raises:
        ValueError: its config has sizes of other names, such as those of a vision model.
    """
    config = small_config(family, **changes)
    with torch.device("meta"):
        weights = sum(
            weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters()
        )
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)
