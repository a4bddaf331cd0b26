import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make_tokenizer, tiny_config

from cpt.models.build import build_model
from cpt.models.families.native import export_native
from cpt.recipe.schema import Model

IDS = torch.arange(3, 63).view(2, 30)
NATIVE = {
    "cpt-gpt2": "GPT2LMHeadModel",
    "minimind2": "LlamaForCausalLM",
    "minimind2_moe": "Qwen2MoeForCausalLM",
    "minimind3": "Qwen3ForCausalLM",
    "minimind3_moe": "Qwen3MoeForCausalLM",
}
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    logits = model.eval()(torch.arange(3, 63).view(2, 30)).logits
    torch.save((type(model).__name__, logits.detach()), folder + "/seen.pt")
assert not any(name == "cpt" or name.startswith("cpt.") for name in sys.modules)
"""


@pytest.mark.slow
def test_every_family_exports_to_a_folder_that_loads_without_this_package(tmp_path: Path):
    expected = {}
    for model_type in NATIVE:
        for kind, shard_size in (("whole", "1GB"), ("sharded", "20KB")):
            model = build_model(
                Model(from_scratch=True, config=tiny_config(model_type)), make_tokenizer(), seed=5
            ).eval()
            folder = tmp_path / f"{model_type}-{kind}"
            model.save_pretrained(folder, max_shard_size=shard_size)
            assert export_native(folder)
            assert len(list(folder.glob("model*.safetensors"))) > 1 or kind == "whole"
            expected[folder] = (NATIVE[model_type], model(IDS).logits)
    subprocess.run([sys.executable, "-c", LOAD, *map(str, expected)], check=True, cwd=tmp_path)
    for folder, (name, logits) in expected.items():
        seen_name, seen = torch.load(folder / "seen.pt")
        assert seen_name == name
        torch.testing.assert_close(seen, logits[..., : seen.shape[-1]], atol=2e-6, rtol=0, msg=folder.name)


@pytest.mark.parametrize(
    "options", [{"n_shared_experts": 2}, {"n_shared_experts": 0}, {"num_experts_per_tok": 1}, {"head_dim": 16}]
)
def test_an_exported_minimind2_mixture_keeps_its_options(options: dict[str, int], tmp_path: Path):
    config = tiny_config("minimind2_moe") | options
    model = build_model(Model(from_scratch=True, config=config), make_tokenizer(), seed=5).eval()
    model.save_pretrained(tmp_path)
    assert export_native(tmp_path)
    native = build_model(Model(path=str(tmp_path)), make_tokenizer()).eval()
    torch.testing.assert_close(native(IDS).logits, model(IDS).logits, atol=2e-6, rtol=0)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_a_native_model_is_left_as_it_is(model_type: str, tmp_path: Path):
    build_model(Model(from_scratch=True, config=tiny_config(model_type)), make_tokenizer()).save_pretrained(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert not export_native(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("model_type", ["minimind2", "minimind3", "minimind3_moe"])
def test_an_exported_model_starts_our_family_again(model_type: str, tmp_path: Path):
    model = build_model(Model(from_scratch=True, config=tiny_config(model_type)), make_tokenizer()).eval()
    model.save_pretrained(tmp_path)
    export_native(tmp_path)
    again = build_model(Model(path=str(tmp_path), config=tiny_config(model_type)), make_tokenizer()).eval()
    assert again.config.model_type == model_type
    assert torch.equal(again(IDS).logits, model(IDS).logits)
