"""Each of our families under the transformers architecture that it equals: for export, and to start from published
weights."""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from cpt.models.families.gpt2 import CptGPT2Config
from cpt.models.families.minimind import MiniMind2Config, MiniMind3Config
from cpt.models.families.minimind_moe import MiniMind2MoEConfig, MiniMind3MoEConfig

StateDict = dict[str, torch.Tensor]

# Our model type -> the model types of checkpoints that it can start from. `minimind` is what MiniMind's own code calls
# itself.
ACCEPTS = {
    "cpt-gpt2": ("gpt2",),
    "minimind2": ("llama", "minimind"),
    "minimind2_moe": ("minimind",),
    "minimind3": ("qwen3", "minimind"),
    "minimind3_moe": ("qwen3_moe", "minimind"),
}


def native_config(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """The config of the transformers architecture with the same logits; None when `config` is not one of our
    families."""
    match config:
        case CptGPT2Config():
            native = _same_fields(config, GPT2Config, "GPT2LMHeadModel")
            native.vocab_size = config.unpadded_vocab_size
            return native
        case MiniMind2MoEConfig():
            return _qwen2_moe_config(config)
        case MiniMind2Config():
            return _same_fields(config, LlamaConfig, "LlamaForCausalLM")
        case MiniMind3MoEConfig():
            native = _same_fields(config, Qwen3MoeConfig, "Qwen3MoeForCausalLM")
            native.output_router_logits = False
            native.head_dim = config.head_dim  # Qwen3-MoE reads it, but does not declare it
            return native
        case MiniMind3Config():
            return _same_fields(config, Qwen3Config, "Qwen3ForCausalLM")
    return None


def native_state_dict(config: PreTrainedConfig, state_dict: StateDict) -> StateDict:
    """The tensors of a saved model of ours, as a checkpoint of the native architecture names and shapes them."""
    match config:
        case CptGPT2Config():
            vocabulary = ("wte.weight", "lm_head.weight")
            tokens = config.unpadded_vocab_size
            return {name: t[:tokens].clone() if name.endswith(vocabulary) else t for name, t in state_dict.items()}
        case MiniMind2MoEConfig():
            return _qwen2_moe_state_dict(config, state_dict)
    return state_dict


def export_native(folder: Path) -> bool:
    """Rewrite a saved model of ours in place, so that plain `from_pretrained` loads it without this package.

    Returns:
        False when the folder holds an architecture of transformers already (nothing is changed).
    """
    config_file = folder / "config.json"
    written = json.loads(config_file.read_text())
    config_class = CONFIG_CLASSES.get(written["model_type"])
    if config_class is None:
        return False
    config = config_class.from_dict(written)
    native = native_config(config)
    assert native is not None, f"{config.model_type} has no native architecture"
    if config.model_type in ("cpt-gpt2", "minimind2_moe"):  # the others have the very same tensors
        _rewrite_weights(folder, lambda tensors: native_state_dict(config, tensors))
    native.save_pretrained(folder)
    return True


CONFIG_CLASSES: dict[str, type[PreTrainedConfig]] = {
    config_class.model_type: config_class
    for config_class in (CptGPT2Config, MiniMind2Config, MiniMind2MoEConfig, MiniMind3Config, MiniMind3MoEConfig)
}


def _same_fields(
    config: PreTrainedConfig, native_class: type[PreTrainedConfig], architecture: str
) -> PreTrainedConfig:
    values: dict[str, Any] = {field.name: getattr(config, field.name) for field in dataclasses.fields(native_class)}
    values |= {"architectures": [architecture], "use_cache": True}
    return native_class(**values)


def _qwen2_moe_config(config: MiniMind2MoEConfig) -> PreTrainedConfig:
    """Qwen2-MoE without biases computes what MiniMind2's mixture does."""
    shared = {field.name for field in dataclasses.fields(Qwen2MoeConfig)} & {
        field.name for field in dataclasses.fields(config)
    }
    values: dict[str, Any] = {name: vars(config)[name] for name in shared}
    values |= {
        "architectures": ["Qwen2MoeForCausalLM"],
        "use_cache": True,
        "head_dim": config.head_dim,  # Qwen2-MoE reads it, but does not declare it
        "qkv_bias": False,
        "norm_topk_prob": config.norm_topk_prob,
        "moe_intermediate_size": config.moe_intermediate_size,
        "shared_expert_intermediate_size": config.intermediate_size * config.n_shared_experts,
        "output_router_logits": False,
    }
    return Qwen2MoeConfig(**values)


def _qwen2_moe_state_dict(config: MiniMind2MoEConfig, state_dict: StateDict) -> StateDict:
    """Several shared experts side by side are one wide expert."""
    renamed = {name: tensor for name, tensor in state_dict.items() if ".shared_experts." not in name}
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        gate = state_dict[f"{mlp}.gate.weight"]
        # Qwen2-MoE multiplies its shared expert by a sigmoid. Zeros make that 1/2, and weights of twice the size undo
        # it exactly.
        renamed[f"{mlp}.shared_expert_gate.weight"] = torch.zeros_like(gate[:1])
        for part, dim, factor in (("gate", 0, 1), ("up", 0, 1), ("down", 1, 2)):
            shared = [
                state_dict[f"{mlp}.shared_experts.{index}.{part}_proj.weight"]
                for index in range(config.n_shared_experts)
            ]
            empty = gate.new_empty((0, config.hidden_size) if dim == 0 else (config.hidden_size, 0))
            renamed[f"{mlp}.shared_expert.{part}_proj.weight"] = factor * torch.cat([*shared, empty], dim=dim)
    return renamed


def _rewrite_weights(folder: Path, convert: Callable[[StateDict], StateDict]) -> None:
    """Replace the folder's safetensors (one file or shards with an index) by the converted ones, of the same largest
    size."""
    old_files = sorted(folder.glob("model*.safetensors"))
    tensors: StateDict = {}
    for file in old_files:
        tensors |= load_file(file)
    largest = max(file.stat().st_size for file in old_files)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        save_torch_state_dict(convert(tensors), scratch, max_shard_size=largest, metadata={"format": "pt"})
        for file in [*old_files, *folder.glob("model.safetensors.index.json")]:
            file.unlink()
        for file in Path(scratch).iterdir():
            shutil.move(file, folder / file.name)
