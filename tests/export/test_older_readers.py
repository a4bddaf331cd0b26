"""Exports for readers of transformers 4.57: the same rotary positions, experts, layers, and tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_tokenizers
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GemmaTokenizer,
    GPT2Tokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from cpt.cache import publish_once
from cpt.export.older_readers import with_older_config_keys, write_older_keys

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def rope(rope_type="default", theta=54321.0, **others):
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": theta, **others}}


YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PER_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 90000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
}
CONFIGS = {
    "llama": ("llama", rope()),
    "llama yarn": ("llama", rope("yarn", **YARN)),
    "llama llama3": ("llama", rope("llama3", **LLAMA3)),
    "llama linear": ("llama", rope("linear", factor=2.0)),
    "llama dynamic": ("llama", rope("dynamic", factor=2.0)),
    "qwen2": ("qwen2", rope()),
    "qwen3 tied": ("qwen3", {**rope(), "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**rope(), **MIXTURE}),
    "mistral": ("mistral", rope()),
    "mixtral": ("mixtral", {**rope(), "num_local_experts": 4}),
    "gemma2": ("gemma2", rope()),
    "gemma3_text": (
        "gemma3_text",
        {"rope_parameters": PER_KIND, "num_hidden_layers": 6, "sliding_window": 16},
    ),
    "nemotron": ("nemotron", rope(partial_rotary_factor=0.5)),
    "phi3": ("phi3", rope(partial_rotary_factor=0.5)),
    "glm4": ("glm4", rope(partial_rotary_factor=0.5)),
    "gpt_neox": ("gpt_neox", rope(partial_rotary_factor=0.25)),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "deepseek_v3": (
        "deepseek_v3",
        {**rope("yarn", **YARN, mscale=1.0, mscale_all_dim=1.0), **LATENT},
    ),
    "gpt_oss": ("gpt_oss", {**rope("yarn", **YARN, truncate=False), "num_local_experts": 4}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **rope(),
            "layer_types": ["linear_attention", "full_attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
        },
    ),
}
TEXTS = ["hello world", "two  spaces\n\nnew", "Ünïcödé 你好", "<|im_end|> </s> x", "", "don't 1234"]


def config_of(name):
    kind, options = CONFIGS[name]
    return AutoConfig.for_model(kind, **{**SMALL, **options})


@pytest.mark.parametrize("name", CONFIGS)
def test_what_older_versions_read_changes_nothing_in_this_version(name, tmp_path):
    config = config_of(name)
    config.save_pretrained(tmp_path)
    write_older_keys(tmp_path)
    before = {**config.to_dict(), "_name_or_path": str(tmp_path)}
    again = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert {key: again.get(key) for key in before} == before


OLDER = {
    "llama yarn": {"rope_theta": 54321.0, "rope_scaling": {"rope_type": "yarn", **YARN}},
    "llama": {"rope_theta": 54321.0, "rope_scaling": None},
    "qwen3_moe": {"rope_theta": 54321.0, "rope_scaling": None, "num_experts": 4},
    "gemma3_text": {
        "rope_theta": 90000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "glm4": {"rope_theta": 54321.0, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "gpt_neox": {"rotary_emb_base": 54321.0, "rotary_pct": 0.25, "rope_scaling": None},
    "gpt2": {},
    "granitemoehybrid": {
        "rope_theta": 54321.0,
        "rope_scaling": None,
        "layer_types": ["mamba", "attention"],
    },
}


@pytest.mark.parametrize("name", OLDER)
def test_what_older_versions_read_is_added_under_its_older_names(name):
    config = config_of(name).to_dict()
    written = with_older_config_keys({**config, "is_local": True})
    assert written == {**config, **OLDER[name]}


def test_kinds_of_layers_have_their_older_names_in_hybrid_families_only():
    kinds = ["linear_attention", "full_attention", "hybrid"]
    for name in ("layer_types", "layers_block_type"):
        config = {"model_type": "zamba2", name: kinds}
        assert with_older_config_keys(config)[name] == ["mamba", "attention", "hybrid"]
        assert with_older_config_keys({**config, "model_type": "qwen3_next"})[name] == kinds
    assert with_older_config_keys({"layer_types": kinds}) == {"layer_types": kinds}


LEAKED = {
    "backend": "tokenizers",
    "is_local": True,
    "local_files_only": True,
    "_from_auto": True,
    "_commit_hash": "0",
}


def test_tokenizers_and_generation_are_written_for_the_generic_class_of_both_versions(tmp_path):
    own = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "Ü"}
    before = {
        "tokenizer_config.json": {**own, "extra_special_tokens": ["<a>", "<b>"]},
        "generation_config.json": {"eos_token_id": [2, 3]},
        "config.json": {"model_type": "gpt2"},
    }
    for name, content in before.items():
        (tmp_path / name).write_text(json.dumps({**content, **LEAKED}))

    def written():
        write_older_keys(tmp_path)
        return {name: json.loads((tmp_path / name).read_text("utf-8")) for name in before}

    without_tokens = {
        **before,
        "tokenizer_config.json": {**before["tokenizer_config.json"], **LEAKED},
    }
    assert written() == without_tokens  # slow tokenizers have no tokenizer.json
    (tmp_path / "tokenizer.json").touch()
    generic = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "Ü",
        "model_input_names": ["input_ids", "attention_mask"],
        "additional_special_tokens": ["<a>", "<b>"],
    }
    assert written() == {**before, "tokenizer_config.json": generic}
    assert "Ü" in (tmp_path / "tokenizer_config.json").read_text("utf-8")
    kept = {"model_input_names": ["input_ids"], "extra_special_tokens": {"image": "<i>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(kept))
    assert written()["tokenizer_config.json"] == {
        **kept,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    code = own | {"auto_map": {"AutoTokenizer": ["mine.T", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**code, **LEAKED}))
    assert written()["tokenizer_config.json"] == code
    (tmp_path / "generation_config.json").unlink()
    write_older_keys(tmp_path)
    assert not (tmp_path / "generation_config.json").exists()


# --- with transformers 4.57 itself, in a folder of its own ---


@pytest.fixture(scope="session")
def older_library(pytestconfig) -> Path:
    """transformers 4.57 without its dependencies, installed once below build/."""
    packages = ["transformers==4.57.6", "tokenizers==0.22.1", "huggingface-hub==0.36.0"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]

    def install(folder: Path) -> None:
        subprocess.run([*pip, str(folder), *packages], check=True)

    # Once, also if two workers ask at the same time.
    return publish_once(pytestconfig.rootpath / "build/transformers-4.57", install, durable=False)


LOAD = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, __version__
assert __version__.startswith("4.57")
texts, result = json.loads(sys.argv[2]), {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    if (folder / "expected.safetensors").exists():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        expected = load_file(folder / "expected.safetensors")["logits"]
        with torch.no_grad():
            logits = model.eval()(torch.arange(60)[None] + 3, use_cache=False).logits
        result[folder.name] = (logits - expected).abs().max().item(), len(info["missing_keys"])
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = [tokenizer(text)["input_ids"] for text in texts]
        result[folder.name] = ids, sorted(tokenizer("a")), tokenizer.additional_special_tokens
print(json.dumps(result))
"""


def load_in_older(library: Path, folder: Path) -> dict:
    command = [sys.executable, "-c", LOAD, str(folder), json.dumps(TEXTS)]
    environment = os.environ | {"PYTHONPATH": str(library), "TRANSFORMERS_VERBOSITY": "error"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.slow
def test_older_versions_compute_the_same_logits(older_library, tmp_path):
    for name in CONFIGS:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(name)).eval()
        with torch.no_grad():
            logits = model(torch.arange(60)[None] + 3, use_cache=False).logits
        model.save_pretrained(tmp_path / name)
        save_file({"logits": logits.contiguous()}, tmp_path / name / "expected.safetensors")
        write_older_keys(tmp_path / name)
    found = load_in_older(older_library, tmp_path)
    wrong = {name: result for name, result in found.items() if result[0] > 1e-5 or result[1]}
    assert found.keys() == CONFIGS.keys() and wrong == {}


@pytest.mark.slow
def test_older_versions_read_the_same_tokens(older_library, tmp_path):
    expected = {}
    for kind in (LlamaTokenizer, Qwen2Tokenizer, GPT2Tokenizer, GemmaTokenizer):
        for add_bos in (None, True, False):
            options = {} if add_bos is None else {"add_bos_token": add_bos}
            tokenizer = kind(**options).train_new_from_iterator([" ".join(TEXTS)] * 9, 400)
            folder = tmp_path / f"{kind.__name__} {add_bos}"
            tokenizer.save_pretrained(folder)
            expected[folder.name] = [tokenizer(text)["input_ids"] for text in TEXTS]
    for make in (tiny_tokenizers.llama3, tiny_tokenizers.llama2, tiny_tokenizers.old_llama2):
        tokenizer = make()
        tokenizer.save_pretrained(tmp_path / make.__name__)
        expected[make.__name__] = [tokenizer(text)["input_ids"] for text in TEXTS]
    own = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizers.byte_level(),
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    own.save_pretrained(tmp_path / "own")
    expected["own"] = [own(text)["input_ids"] for text in TEXTS]
    for folder in tmp_path.iterdir():
        write_older_keys(folder)
    found = load_in_older(older_library, tmp_path)
    assert {name: result[0] for name, result in found.items()} == expected
    assert {tuple(result[1]) for result in found.values()} == {("attention_mask", "input_ids")}
    assert found["own"][2] == ["<|im_start|>", "<|im_end|>"]
