"""Export each of our families as the transformers architecture that it equals."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from cpt.models.families.gpt2 import CptGPT2Config
from cpt.models.families.minimind_moe import MiniMind2MoEConfig
from cpt.models.families.register import FAMILIES

StateDict = dict[str, torch.Tensor]


def export_native(folder: Path) -> bool:
    """Rewrite a saved model of ours in place, so that plain `from_pretrained` loads it without this package.

    Returns:
        False when the folder holds an architecture of transformers already (nothing is changed).
    """
    written = json.loads((folder / "config.json").read_text())
    if written["model_type"] not in FAMILIES:
        return False
    config = FAMILIES[written["model_type"]].config.from_dict(written)
    if isinstance(config, CptGPT2Config):
        _rewrite_weights(folder, lambda tensors: _cut_vocabulary(config, tensors))
    elif isinstance(config, MiniMind2MoEConfig):
        _rewrite_weights(folder, lambda tensors: _qwen2_moe_state_dict(config, tensors))
    native_config(config).save_pretrained(folder)  # the others have the very same tensors
    return True


def native_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the transformers architecture with the same logits."""
    native_class = FAMILIES[config.model_type].native
    own = {field.name for field in fields(config)}
    values: dict[str, Any] = {
        field.name: getattr(config, field.name) for field in fields(native_class) if field.name in own
    }
    architecture = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[native_class]).__name__
    values |= {"architectures": [architecture], "use_cache": True}
    if isinstance(config, CptGPT2Config):
        values["vocab_size"] = config.unpadded_vocab_size
    if "num_experts" in values:
        # Both Qwen mixtures read `head_dim`, but do not declare it.
        values |= {"output_router_logits": False, "head_dim": config.head_dim}
    if isinstance(config, MiniMind2MoEConfig):  # Qwen2-MoE without biases computes what MiniMind2's mixture does
        values |= {
            "qkv_bias": False,
            "norm_topk_prob": config.norm_topk_prob,
            "moe_intermediate_size": config.moe_intermediate_size,
            "shared_expert_intermediate_size": config.intermediate_size * config.n_shared_experts,
        }
    return native_class(**values)


def _cut_vocabulary(config: CptGPT2Config, state_dict: StateDict) -> StateDict:
    vocabulary, tokens = ("wte.weight", "lm_head.weight"), config.unpadded_vocab_size
    return {name: t[:tokens].clone() if name.endswith(vocabulary) else t for name, t in state_dict.items()}


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
