"""Write configs and tokenizers so that transformers 4.57, and servers built on it, read them like transformers 5."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TOKENIZER_CONFIG = "tokenizer_config.json"
# Names of transformers 4, by model type: of `rope_theta` and `partial_rotary_factor`, and of kinds of layers.
ROTARY_NAMES = {
    "gpt_neox": ("rotary_emb_base", "rotary_pct"),
    "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct"),
}
LAYER_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
WITH_MAMBA = ("granitemoehybrid", "zamba", "zamba2")
# They describe the process that saved the tokenizer, not the tokenizer.
LEAKED = ("backend", "is_local", "local_files_only", "_from_auto", "_commit_hash")


def write_older_keys(folder: Path) -> None:
    """Add what transformers 4.57 reads to `config.json` and `tokenizer_config.json`, and remove leaked keys.

    Without `rope_theta` it takes the default of 10,000, without a warning.
    """
    rewrite_json(folder / "config.json", with_older_config_keys)
    rewrite_json(folder / "generation_config.json", without_leaked)
    if (folder / "tokenizer.json").is_file():
        rewrite_json(folder / TOKENIZER_CONFIG, with_older_tokenizer_keys)


def rewrite_json(file: Path, change: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Replace the object in a JSON file, if it exists, by what `change` returns."""
    if file.is_file():
        content = change(json.loads(file.read_text(encoding="utf-8")))
        text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")


def without_leaked(content: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in content.items() if name not in LEAKED}


def with_older_config_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    older = without_leaked(config)
    model_type = config.get("model_type", "")
    if model_type == "qwen3_moe":
        older["num_experts"] = config["num_local_experts"]
    for name in ("layer_types", "layers_block_type"):
        if model_type in WITH_MAMBA and config.get(name):
            older[name] = [LAYER_KINDS.get(kind, kind) for kind in config[name]]
    rope = config.get("rope_parameters")
    if not rope:
        return older
    if "full_attention" in rope:  # one set of parameters for each kind of layer
        if "sliding_attention" in rope:
            older["rope_local_base_freq"] = rope["sliding_attention"].get("rope_theta")
        rope = rope["full_attention"]
    scaling = dict(rope)
    theta_name, partial_name = ROTARY_NAMES.get(model_type, ("rope_theta", "partial_rotary_factor"))
    older[theta_name] = scaling.pop("rope_theta", None)
    if "partial_rotary_factor" in scaling:
        older[partial_name] = scaling.pop("partial_rotary_factor")
    is_scaled = scaling.get("rope_type", "default") != "default"
    older["rope_scaling"] = scaling if is_scaled else None
    return older


def with_older_tokenizer_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Name the generic class of both versions, which does what `tokenizer.json` says. In transformers 4, Llama's and
    Gemma's classes add a BOS, and the generic ones of transformers 5 are unknown."""
    older = without_leaked(config)
    if "auto_map" in config:  # it brings its own class
        return older
    older["tokenizer_class"] = "PreTrainedTokenizerFast"
    older.setdefault("model_input_names", ["input_ids", "attention_mask"])
    if isinstance(older.get("extra_special_tokens"), list):
        older["additional_special_tokens"] = older.pop("extra_special_tokens")
    return older
