import pytest
import torch
from tiny_models import TINY, tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, LlamaConfig, Mamba2Config

from cpt.models.config import config_from
from cpt.models.inventory import (
    attention_heads,
    count_parameters,
    flops_per_token,
    isolates_documents,
    longest_row,
    runs_along_the_row,
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
    assert not isolates_documents(Mamba2Config(vocab_size=96, hidden_size=32, num_heads=8, head_dim=8, num_hidden_layers=1, n_groups=1))


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
"""


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "nemotron"])
def test_operations_are_those_that_torch_counts(family):
    """Forward and backward of one row; torch counts attention without the saving of a causal mask, so it is counted twice here."""
    config = config_from({**tiny_config(family), "tie_word_embeddings": False})
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    tokens = 32
    causal = flops_per_token(model, tokens)
    whole = 2 * causal - flops_per_token(model, 0)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert counter.get_total_flops() / tokens == pytest.approx(whole, rel=0.08)


@pytest.mark.parametrize(("model_type", "heads"), [("llama", 32), ("gpt2", 12), ("gpt_neo", 16), ("mpt", 16), ("mamba2", 0)])
def test_heads_are_known_by_whatever_name_a_config_has_for_them(model_type, heads):
    assert attention_heads(AutoConfig.for_model(model_type)) == heads


def test_the_longest_row_is_what_the_config_names():
    assert longest_row(config_from(tiny_config("gpt2"))) == 64
    assert longest_row(config_from({"model_type": "mamba", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1})) is None


@pytest.mark.parametrize("layer", [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN, torch.nn.LSTMCell, torch.nn.GRUCell])
def test_torchs_own_recurrent_layers_run_along_the_row(layer):
    assert runs_along_the_row(torch.nn.Sequential(torch.nn.Linear(4, 4), layer(4, 4)))
    assert not runs_along_the_row(torch.nn.Sequential(torch.nn.Linear(4, 4)))
