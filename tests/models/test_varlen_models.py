"""Each model that is said to be proven: a tiny one of its kind reads packed rows as each document alone."""

import pytest
import torch
from tiny_models import TINY
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cpt.models.attention import PROVEN, VARLEN, WINDOW_IN_MASK_ONLY, keep_documents_apart, register_varlen
from cpt.models.families import register_families
from cpt.models.inventory import isolates_documents

LENGTHS = ((9, 4, 1, 10), (16, 8))
POSITIONS = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
IDS = torch.randint(3, 96, POSITIONS.shape, generator=torch.Generator().manual_seed(0))
WITHOUT_GROUPS = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "longcat_flash", "axk1")
NO_DROPOUT = (
    "attention_dropout",
    "attn_pdrop",
    "resid_pdrop",
    "embd_pdrop",
    "dropout",
    "hidden_dropout",
    "activation_dropout",
)
SMALL = {
    **dict.fromkeys(("vocab_size",), 96),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4
    ),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "max_window_layers", "bos_token_id"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 128),
    **dict.fromkeys(NO_DROPOUT, 0.0),
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 5,
    "use_sliding_window": True,
    "multi_query": False,
}


def tiny_of(model_type):
    """Its config with every size that it knows made small, and a window where it can have one."""
    register_families()
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    known = AutoConfig.for_model(model_type)
    small = {name: value for name, value in SMALL.items() if name in vars(known) or name in known.attribute_map}
    if model_type in WITHOUT_GROUPS:
        small.pop("num_key_value_heads", None)
    if model_type in WINDOW_IN_MASK_ONLY:
        small |= {"sliding_window": None, "use_sliding_window": False}
    if model_type in TINY:
        small |= TINY[model_type]
    return AutoConfig.for_model(model_type, **small, use_cache=False)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in TINY else pytest.mark.slow) for name in PROVEN.split()]
)
def test_a_proven_model_reads_packed_documents_as_each_alone(model_type):
    torch.manual_seed(1)
    config = tiny_of(model_type)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().float()
    with torch.no_grad():
        alone = [
            torch.cat([model(input_ids=piece[None]).logits[0] for piece in row.split(lengths)])
            for row, lengths in zip(IDS, LENGTHS, strict=True)
        ]
        leaking = model(input_ids=IDS).logits
        register_varlen()
        model.set_attn_implementation(VARLEN)
        keep_documents_apart(model)
        packed = model(input_ids=IDS, position_ids=POSITIONS).logits
    error = (packed - torch.stack(alone)).abs().max()
    assert error < 1e-5 and (leaking - packed).abs().max() > 30 * error, "and it would have been seen"
    assert isolates_documents(config)
