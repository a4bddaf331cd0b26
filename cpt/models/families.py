"""Our model families: GPT-2 with a padded vocabulary and MiniMind; how transformers learns of them, and their export
as architectures of transformers."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from cpt.models.minimind import (
    MiniMind2Config,
    MiniMind2ForCausalLM,
    MiniMind2MoEConfig,
    MiniMind2MoEForCausalLM,
    MiniMind3Config,
    MiniMind3ForCausalLM,
    MiniMind3MoEConfig,
    MiniMind3MoEForCausalLM,
)


class CptGPT2Config(GPT2Config):
    """GPT-2's config, padded; without dropout, as models are pre-trained and continued today."""

    model_type = "cpt-gpt2"
    vocab_size: int = 50304  # rows: 50257 rounded up to a multiple of 64, a shape that tensor cores take whole
    unpadded_vocab_size: int = 50257
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.add_cross_attention:
            raise ValueError("add_cross_attention: there is no encoder to attend to. Remove it.")
        if self.unpadded_vocab_size > self.vocab_size:
            raise ValueError(
                f"unpadded_vocab_size ({self.unpadded_vocab_size}) is larger than vocab_size ({self.vocab_size})."
            )


class PaddedVocabularyHead(nn.Linear):
    """A language model head whose rows past `num_tokens` always give the smallest number of the dtype.

    Loss, argmax and sampling then never see them, and their gradient is zero. Code that multiplies with
    `lm_head.weight` itself (chunked or fused losses) must cut the weight to `num_tokens` rows.
    """

    def __init__(self, width: int, rows: int, num_tokens: int) -> None:
        super().__init__(width, rows, bias=False)
        self.num_tokens = num_tokens

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden_states)
        if self.num_tokens < logits.shape[-1]:
            logits[..., self.num_tokens :] = torch.finfo(logits.dtype).min
        return logits


class CptGPT2ForCausalLM(GPT2LMHeadModel):
    """transformers' GPT-2 (attention by its interface: sdpa, flash, eager) under the padded head."""

    config: CptGPT2Config

    def __init__(self, config: CptGPT2Config) -> None:
        # GPT2LMHeadModel's own __init__ would build the plain head first.
        super(GPT2LMHeadModel, self).__init__(config)
        self.transformer = GPT2Model(config)
        self.lm_head = PaddedVocabularyHead(config.n_embd, config.vocab_size, config.unpadded_vocab_size)
        self.post_init()

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Embedding:
        """Make room for `new_num_tokens` tokens; padding rows that become tokens start as the mean of the known
        ones."""
        known = self.config.unpadded_vocab_size
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        if new_num_tokens is None:
            return embeddings
        with torch.no_grad():
            embeddings.weight[known:] = embeddings.weight[:known].mean(dim=0)
        self.config.unpadded_vocab_size = new_num_tokens
        self.lm_head = PaddedVocabularyHead(self.config.n_embd, embeddings.weight.shape[0], new_num_tokens)
        self.tie_weights()
        return embeddings


def pad_vocabulary(state_dict: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """A published GPT-2's weights with `rows` rows in the token embedding; the new ones are the mean of the old."""
    padded = {}
    for name, tensor in state_dict.items():
        if name.endswith(("wte.weight", "lm_head.weight")) and tensor.shape[0] < rows:
            filling = tensor.float().mean(dim=0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat([tensor, filling.expand(rows - tensor.shape[0], -1)])
        padded[name] = tensor
    return padded


StateDict = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Family:
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    native: type[PreTrainedConfig]
    """The architecture of transformers with the same logits."""
    starts_from: tuple[str, ...]
    """Model types of checkpoints that it can start from. `minimind` is what MiniMind's own code calls itself."""


FAMILIES = {
    "cpt-gpt2": Family(CptGPT2Config, CptGPT2ForCausalLM, GPT2Config, ("gpt2",)),
    "minimind2": Family(MiniMind2Config, MiniMind2ForCausalLM, LlamaConfig, ("llama", "minimind")),
    "minimind2_moe": Family(MiniMind2MoEConfig, MiniMind2MoEForCausalLM, Qwen2MoeConfig, ("minimind",)),
    "minimind3": Family(MiniMind3Config, MiniMind3ForCausalLM, Qwen3Config, ("qwen3", "minimind")),
    "minimind3_moe": Family(MiniMind3MoEConfig, MiniMind3MoEForCausalLM, Qwen3MoeConfig, ("qwen3_moe", "minimind")),
}


def register_families() -> None:
    """Idempotent: call it before any config or model of ours is read."""
    for model_type, family in FAMILIES.items():
        AutoConfig.register(model_type, family.config, exist_ok=True)
        AutoModelForCausalLM.register(family.config, family.model, exist_ok=True)
    for model_type in ("minimind2_moe", "minimind3_moe"):
        # On disk each expert has its own tensors (MiniMind's names), in memory they are one: the conversion is
        # Qwen3-MoE's.
        register_checkpoint_conversion_mapping(
            model_type, get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True
        )


# --- export ----------------------------------------------------------------------------------------------------------


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
