"""Each family as a file, read back by readers that know nothing of ours: transformers, and llama.cpp where it is
installed."""

import pytest
import torch
from tiny_gguf import TYPES, read_back, tiny_model, written
from transformers import AutoTokenizer

from cpt.checkpoints.proof import difference, logits_of
from cpt.errors import CheckpointError
from cpt.exporting.gguf_families import family_of
from cpt.exporting.gguf_proof import LlamaCpp, refuse_other_tokens


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.mark.parametrize("model_type", TYPES)
def test_transformers_reads_the_same_logits_back(model_type, tokenizer, tmp_path):
    model = tiny_model(model_type, tokenizer)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    text = written(model, tokenizer, tmp_path / "model.gguf")
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert difference(logits_of(model, text), read_back(tmp_path / "model.gguf", text), torch.float32).is_allowed


@pytest.mark.parametrize("model_type", TYPES)
def test_a_quantised_file_holds_the_numbers_that_the_model_was_given(model_type, tokenizer, tmp_path):
    model = tiny_model(model_type, tokenizer)
    text = written(model, tokenizer, tmp_path / "unquantised.gguf")
    exact = logits_of(model, text)
    written(model, tokenizer, tmp_path / "model.gguf", "q4_0")
    rounded = logits_of(model, text)
    assert difference(rounded, read_back(tmp_path / "model.gguf", text), torch.float32).is_allowed
    assert 1e-3 < (rounded - exact).abs().max() < exact.abs().max()


@pytest.mark.llama_cpp
@pytest.mark.parametrize("model_type", TYPES)
def test_llama_cpp_reads_the_same_tokens_and_logits(model_type, tokenizer, tmp_path):
    model = tiny_model(model_type, tokenizer)
    text = written(model, tokenizer, tmp_path / "model.gguf")
    reader = LlamaCpp(tmp_path / "model.gguf", len(text.ids))
    refuse_other_tokens(reader, tokenizer, text)
    assert difference(logits_of(model, text), reader.logits(text.ids), torch.float32, 1e-3).is_allowed
    reader.close()


def test_a_tied_head_is_stored_once_and_an_own_head_beside_the_embedding(tokenizer, tmp_path):
    sizes = []
    for tied in (True, False):
        model = tiny_model("llama", tokenizer, tie_word_embeddings=tied)
        file = tmp_path / f"{tied}.gguf"
        text = written(model, tokenizer, file)
        assert difference(logits_of(model, text), read_back(file, text), torch.float32).is_allowed
        sizes.append(file.stat().st_size)
    assert sizes[1] - sizes[0] >= model.get_output_embeddings().weight.numel() * 4


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("llama", {"attention_bias": True}, "it has biases"),
        ("llama", {"hidden_act": "gelu"}, "its activation is gelu"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rotary embeddings are stretched .linear"),
        ("mistral", {"sliding_window": 16}, "a sliding window of 16 tokens"),
        ("qwen3_moe", {"norm_topk_prob": False}, "not normalised"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "some of its layers have no experts"),
        ("gpt2", {"activation_function": "relu"}, "its activation is relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "its attention is scaled otherwise"),
        ("nemotron", {"hidden_act": "silu"}, "its activation is silu"),
        ("deepseek_v3", {}, "this is DeepseekV3ForCausalLM"),
    ],
)
def test_what_would_not_be_the_same_model_is_refused_with_the_way_around(model_type, changes, reason, tokenizer):
    model = tiny_model(model_type, tokenizer, **changes)
    with pytest.raises(CheckpointError, match=rf"{reason}.*convert_hf_to_gguf\.py"):
        family_of(model.config, "folder")
