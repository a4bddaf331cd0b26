import pytest
from tiny_models import TINY, tiny_config
from transformers import LlamaConfig, Mamba2Config

from cpt.models.config import config_from
from cpt.models.inventory import count_parameters, isolates_documents, vocabulary_size


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


def test_padding_rows_are_not_tokens():
    assert vocabulary_size(config_from(tiny_config("cpt-gpt2"))) == 97
    assert vocabulary_size(LlamaConfig(vocab_size=50)) == 50
