import pytest
import torch
from tiny import SHAPE, TINY, tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from cpt.models.config import config_from
from cpt.models.inventory import (
    attention_flops,
    count_parameters,
    flops_per_token,
    isolates_documents,
    state_space_flops,
)


def test_active_parameters_leave_out_the_experts_that_are_not_chosen():
    count = count_parameters(config_from(tiny_config("minimind2_moe")))
    expert = 3 * 32 * 48
    assert count.total - count.active == 2 * 2 * expert  # 2 layers, 2 of 4 routed experts idle


RECURRENT_KINDS = """
    bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear mamba minimax olmo_hybrid
    qwen3_5_text qwen3_next recurrent_gemma rwkv zamba zamba2 zaya
"""
MASK_WITHOUT_POSITIONS = ("falcon", "opt", "gpt_oss", "roberta")


@pytest.mark.parametrize(
    "model_type",
    [
        "mamba2",
        *MASK_WITHOUT_POSITIONS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT_KINDS.split()),
    ],
)
def test_recurrent_layers_and_masks_that_do_not_look_at_positions_keep_no_documents_apart(
    model_type,
):
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not have it")
    assert not isolates_documents(AutoConfig.for_model(model_type))


def test_a_hybrid_keeps_no_documents_apart():
    assert not isolates_documents(config_from(tiny_config("nemotron_h")))


ONLY_HERE = {
    "gemma3_text": {**SHAPE, "intermediate_size": 48, "head_dim": 8},
    "deepseek_v2": {
        **TINY["deepseek_v3"],
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "v_head_dim": 4,
    },
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}
COUNTED = [
    name for name in TINY if name not in ("minimind2", "minimind3", "qwen2", "qwen3")
]  # as llama, qwen3_moe


@pytest.mark.parametrize("model_type", [*COUNTED, *ONLY_HERE])
def test_operations_are_those_that_torch_counts(model_type):
    """Forward and backward of one row. Torch counts scores of tokens to come too, and no products that are written
    element by element."""
    shape = {
        "model_type": model_type,
        **{**TINY, **ONLY_HERE}[model_type],
        "tie_word_embeddings": False,
    }
    config, tokens = config_from(shape), 32
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    states = state_space_flops(model)
    with FlopCounterMode(display=False) as counter:
        logits = model(input_ids=torch.arange(tokens).unsqueeze(0) + 3, use_cache=False).logits
        if not states:
            logits.sum().backward()
    # Of a depthwise convolution, torch counts the backward pass too high.
    counted = counter.get_total_flops() * (3 if states else 1)
    expected = tokens * (flops_per_token(model, tokens) + 3 * attention_flops(config, tokens))
    # Without its kernels, transformers writes a part of a state space layer as matrix products, more or less than we
    # count.
    assert (
        0.999 * expected - 3 * tokens * states <= counted <= (1.03 if states else 1.001) * expected
    )


def test_layers_with_and_without_a_window_are_counted_apart():
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    config = config_from({"model_type": "gemma3_text", **ONLY_HERE["gemma3_text"], **kinds})
    seen = (
        sum(min(place, 8) for place in range(32)) / 32 + 32 / 2
    )  # positions that a token sees, on average
    heads = SHAPE["num_attention_heads"]
    assert attention_flops(config, 32) == pytest.approx(2 * heads * (8 + 8) * seen, rel=0.03)
