from pathlib import Path

import pytest
import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.models.build import build_model
from cpt.models.families import export_native
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)


@pytest.mark.parametrize(
    "options",
    [
        {"n_shared_experts": 2, "hidden_act": "gelu"},
        {"n_shared_experts": 0, "num_key_value_heads": 1},
        {"num_experts_per_tok": 1, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"head_dim": 16, "tie_word_embeddings": False},
    ],
)
def test_an_exported_minimind2_mixture_keeps_its_options(options: dict[str, int], tmp_path: Path):
    config = tiny_config("minimind2_moe") | options
    model = build_model(Model(from_scratch=True, config=config), make_tokenizer(), seed=5).eval()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    export_native(tmp_path)
    native = build_model(Model(path=str(tmp_path)), make_tokenizer()).eval()
    torch.testing.assert_close(native(IDS).logits, model(IDS).logits, atol=2e-6, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_native_model_is_left_as_it_is(model_type: str, tmp_path: Path):
    build_model(Model(from_scratch=True, config=tiny_config(model_type)), make_tokenizer()).save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    export_native(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("model_type", ["minimind2", "minimind3", "minimind3_moe"])
def test_an_exported_model_starts_our_family_again(model_type: str, tmp_path: Path):
    model = build_model(Model(from_scratch=True, config=tiny_config(model_type)), make_tokenizer()).eval()
    model.save_pretrained(tmp_path)
    export_native(tmp_path)
    again = build_model(Model(path=str(tmp_path), config=tiny_config(model_type)), make_tokenizer()).eval()
    assert again.config.model_type == model_type
    assert torch.equal(again(IDS).logits, model(IDS).logits)
