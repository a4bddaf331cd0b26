import pytest
import torch
from tiny_models import SHAPE, TINY, tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, Mamba2Config

from cpt.models.config import config_from
from cpt.models.inventory import (
    attention_flops,
    attention_heads,
    build_on_meta,
    count_parameters,
    flops_per_token,
    isolates_documents,
    longest_row,
    runs_along_the_row,
    state_space_flops,
    vocabulary_size,
)


def test_a_tied_head_counts_once():
    tied, untied = (config_from({**tiny_config("llama"), "tie_word_embeddings": tie}) for tie in (True, False))
    assert count_parameters(untied).total - count_parameters(tied).total == 96 * 32


def test_active_parameters_leave_out_the_experts_that_are_not_chosen():
    count = count_parameters(config_from(tiny_config("minimind2_moe")))
    expert = 3 * 32 * 48
    assert count.total - count.active == 2 * 2 * expert  # 2 layers, 2 of 4 routed experts idle


@pytest.mark.parametrize("model_type", sorted(set(TINY) - {"nemotron_h"}))
def test_attention_models_keep_packed_documents_apart(model_type: str):
    assert isolates_documents(config_from(tiny_config(model_type)))


def test_mamba_and_its_hybrids_do_not():
    assert not isolates_documents(config_from(tiny_config("nemotron_h")))
    assert not isolates_documents(
        Mamba2Config(vocab_size=96, hidden_size=32, num_heads=8, head_dim=8, num_hidden_layers=1, n_groups=1)
    )


@pytest.mark.parametrize(
    "small",
    [
        {"model_type": "jamba", "num_hidden_layers": 8, "hidden_size": 64},
        {"model_type": "falcon_h1", "num_hidden_layers": 1},
        {"model_type": "qwen3_next", "num_hidden_layers": 4},
        {"model_type": "lfm2", "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
        {"model_type": "rwkv", "num_hidden_layers": 1},
        {"model_type": "recurrent_gemma", "num_hidden_layers": 3},
    ],
    ids=lambda small: small["model_type"],
)
def test_other_recurrent_architectures_do_not_either(small: dict):
    assert not isolates_documents(config_from(small))


RECURRENT_KINDS = """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba mamba2 minimax olmo_hybrid qwen3_5_text qwen3_next
    recurrent_gemma rwkv zamba zamba2 zaya
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("model_type", RECURRENT_KINDS.split())
def test_every_recurrent_kind_of_transformers_is_known(model_type: str):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    assert not isolates_documents(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("model_type", ["falcon", "opt", "gpt_oss", "roberta"])
def test_masks_that_do_not_look_at_positions_keep_nothing_apart(model_type: str):
    assert not isolates_documents(AutoConfig.for_model(model_type))


def test_a_name_that_only_sounds_recurrent_is_not():
    small = {"num_hidden_layers": 1, "hidden_size": 32, "vocab_size": 96, "intermediate_size": 48, "head_dim": 8}
    assert isolates_documents(AutoConfig.for_model("seed_oss", **small)), "SeedOssMLP"


def test_padding_rows_are_not_tokens():
    assert vocabulary_size(config_from(tiny_config("cpt-gpt2"))) == 97
    assert vocabulary_size(LlamaConfig(vocab_size=50)) == 50


LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
}
QWEN2 = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
QWEN2 |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
QWEN3_MOE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
QWEN3_MOE |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
DEEPSEEK = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
DEEPSEEK_V2_LITE = DEEPSEEK | {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
}
DEEPSEEK_V2_LITE |= {
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
}
DEEPSEEK_V2_LITE |= {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}
GEMMA_2B = {
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 256,
}
GEMMA2_2B = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
GEMMA3_1B = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
}
GEMMA3_1B |= {"num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512}
MINITRON_4B = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 24,
}
NEMOTRON_H_8B = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
}
NEMOTRON_H_8B |= {
    "n_groups": 8,
    "ssm_state_size": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
NEMOTRON_H_8B |= {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"}
MAMBA_130M = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16}

# Model type, published sizes, weights of the matrices that one token meets, (heads x (key + value width), positions)
# of the layers.
T = 8192
HALF = T / 2
BY_HAND = [
    ("gpt2", {}, 12 * 12 * 768**2 + 50257 * 768, [(12 * 12 * 128, HALF)]),
    ("cpt-gpt2", {}, 12 * 12 * 768**2 + 50304 * 768, [(12 * 12 * 128, HALF)]),
    ("minimind2", {}, 16 * (2 * 768**2 + 2 * 768 * 192 + 3 * 768 * 2048) + 6400 * 768, [(16 * 8 * 192, HALF)]),
    (
        "minimind2_moe",
        {},
        8 * (2 * 640**2 + 2 * 640 * 160 + 640 * 4 + 3 * 3 * 640 * 1728) + 6400 * 640,
        [(8 * 8 * 160, HALF)],
    ),
    ("minimind3", {}, 8 * (2 * 768**2 + 2 * 768 * 384 + 3 * 768 * 2432) + 6400 * 768, [(8 * 8 * 192, HALF)]),
    (
        "minimind3_moe",
        {},
        8 * (2 * 768**2 + 2 * 768 * 384 + 768 * 4 + 3 * 768 * 2432) + 6400 * 768,
        [(8 * 8 * 192, HALF)],
    ),
    (
        "llama",
        LLAMA_8B,
        32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 128256 * 4096,
        [(32 * 32 * 256, HALF)],
    ),
    ("qwen2", QWEN2, 24 * (2 * 896**2 + 2 * 896 * 128 + 3 * 896 * 4864) + 151936 * 896, [(24 * 14 * 128, HALF)]),
    ("qwen3", QWEN3, 28 * (2 * 1024 * 2048 + 2 * 1024**2 + 3 * 1024 * 3072) + 151936 * 1024, [(28 * 16 * 256, HALF)]),
    (
        "qwen2_moe",
        {},
        24 * (4 * 2048**2 + 60 * 2048 + 4 * 3 * 2048 * 1408 + 3 * 2048 * 5632 + 2048) + 151936 * 2048,
        [(24 * 16 * 256, HALF)],
    ),
    (
        "qwen3_moe",
        QWEN3_MOE,
        48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 128 * 2048 + 8 * 3 * 2048 * 768) + 151936 * 2048,
        [(48 * 32 * 256, HALF)],
    ),
    (
        "deepseek_v2",
        DEEPSEEK_V2_LITE,
        27 * (2048 * 16 * 192 + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048)
        + 3 * 2048 * 10944
        + 26 * (64 * 2048 + (6 + 2) * 3 * 2048 * 1408)
        + 102400 * 2048,
        [(27 * 16 * (192 + 128), HALF)],
    ),
    (
        "deepseek_v3",
        {},
        61 * (7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168)
        + 3 * 3 * 7168 * 18432
        + 58 * (256 * 7168 + (8 + 1) * 3 * 7168 * 2048)
        + 129280 * 7168,
        [(61 * 128 * (192 + 128), HALF)],
    ),
    (
        "gemma",
        GEMMA_2B | {"intermediate_size": 16384},
        18 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 16384) + 256000 * 2048,
        [(18 * 8 * 512, HALF)],
    ),
    (
        "gemma2",
        GEMMA2_2B,
        26 * (2 * 2304 * 2048 + 2 * 2304 * 1024 + 3 * 2304 * 9216) + 256000 * 2304,
        [
            (13 * 8 * 512, HALF),
            (13 * 8 * 512, (4096 * 2048 + 4096 * 4096) / T),
        ],  # half of the row grows up to the window, the rest has it
    ),
    (
        "gemma3_text",
        GEMMA3_1B,
        26 * (2 * 1152 * 1024 + 2 * 1152 * 256 + 3 * 1152 * 6912) + 262144 * 1152,
        [(4 * 4 * 512, HALF), (22 * 4 * 512, (512 * 256 + 7680 * 512) / T)],
    ),
    (
        "mistral",
        {},
        32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 32000 * 4096,
        [(32 * 32 * 256, (4096 * 2048 + 4096 * 4096) / T)],
    ),
    (
        "nemotron",
        MINITRON_4B | {"num_key_value_heads": 8, "head_dim": 128},
        32 * (2 * 3072**2 + 2 * 3072 * 1024 + 2 * 3072 * 9216) + 256000 * 3072,
        [(32 * 24 * 256, HALF)],
    ),
    (
        "nemotron_h",
        NEMOTRON_H_8B,
        24 * (4096 * (2 * 8192 + 2 * 8 * 128 + 128) + 4 * (8192 + 2 * 8 * 128) + 8192 * 4096)
        + 24 * 2 * 4096 * 21504
        + 4 * (2 * 4096**2 + 2 * 4096 * 1024)
        + 131072 * 4096,
        [(4 * 32 * 256, HALF), (24 * 8192 * 128, 3.5)],  # 7 for each number of a state
    ),
    (
        "mamba",
        MAMBA_130M,
        24 * (768 * 2 * 1536 + 4 * 1536 + 1536 * (48 + 2 * 16) + 48 * 1536 + 1536 * 16 + 1536 * 768) + 50280 * 768,
        [(24 * 1536 * 16, 3.5)],
    ),
]


@pytest.mark.parametrize(("model_type", "sizes", "matrices", "layers"), BY_HAND, ids=[case[0] for case in BY_HAND])
def test_operations_are_the_sum_of_what_the_layers_compute(model_type, sizes, matrices, layers):
    model = build_on_meta(config_from({"model_type": model_type, **sizes}))
    others = sum(2 * size * positions for size, positions in layers)
    assert flops_per_token(model, T) == pytest.approx(6 * matrices + 3 * others, rel=1e-9)
    assert flops_per_token(model, T, trains_weights=False) == pytest.approx(4 * matrices + 3 * others, rel=1e-9)


TINY_ONLY_HERE = {
    "gemma": {**SHAPE, "intermediate_size": 48, "head_dim": 8},
    "gemma2": {**SHAPE, "intermediate_size": 48, "head_dim": 8},
    "gemma3_text": {**SHAPE, "intermediate_size": 48, "head_dim": 8},
    "mistral": {**SHAPE, "intermediate_size": 48, "head_dim": 8, "sliding_window": None},
    "qwen2_moe": {
        **SHAPE,
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 24,
    },
    "deepseek_v2": {**TINY["deepseek_v3"], "q_lora_rank": None, "qk_nope_head_dim": 16, "v_head_dim": 4},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


@pytest.mark.parametrize("model_type", [*TINY, *TINY_ONLY_HERE])
def test_operations_are_those_that_torch_counts(model_type):
    """Forward and backward of one row. Torch counts scores of tokens to come too, and no products that are written
    element by element."""
    config = config_from(
        {"model_type": model_type, **{**TINY, **TINY_ONLY_HERE}[model_type], "tie_word_embeddings": False}
    )
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    tokens = 32
    ids = torch.arange(tokens).unsqueeze(0) + 3
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=ids, use_cache=False).logits
        if not (states := state_space_flops(model)):
            logits.sum().backward()
    counted = counter.get_total_flops() * (
        3 if states else 1
    )  # of a depthwise convolution, torch counts the backward pass too high
    expected = tokens * (flops_per_token(model, tokens) + 3 * attention_flops(config, tokens))
    # Without its kernels, transformers writes a part of a state space layer as matrix products, more or less than we
    # count.
    assert 0.999 * expected - 3 * tokens * states <= counted <= (1.03 if states else 1.001) * expected


@pytest.mark.parametrize(
    ("model_type", "heads"), [("llama", 32), ("gpt2", 12), ("gpt_neo", 16), ("mpt", 16), ("mamba2", 0)]
)
def test_heads_are_known_by_whatever_name_a_config_has_for_them(model_type, heads):
    assert attention_heads(AutoConfig.for_model(model_type)) == heads


def test_the_longest_row_is_what_the_config_names():
    assert longest_row(config_from(tiny_config("gpt2"))) == 64
    assert (
        longest_row(config_from({"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1}))
        is None
    )


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN, torch.nn.LSTMCell, torch.nn.GRUCell])
def test_torchs_own_recurrent_layers_run_along_the_row(layer):
    assert runs_along_the_row(torch.nn.Sequential(torch.nn.Linear(4, 4), layer(4, 4)))
    assert not runs_along_the_row(torch.nn.Sequential(torch.nn.Linear(4, 4)))
