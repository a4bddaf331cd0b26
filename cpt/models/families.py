"""Our model families, GPT-2 with a padded vocabulary and MiniMind: their registration with transformers, and their
export as architectures of transformers."""

import json
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
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from cpt.files import replacing
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

StateDict = dict[str, torch.Tensor]
VOCABULARY_TABLES = ("wte.weight", "lm_head.weight")


class CptGPT2Config(GPT2Config):
    """GPT-2's config with a padded vocabulary, and without dropout, as usual in pre-training today."""

    model_type = "cpt-gpt2"
    vocab_size: int = 50304  # rows: 50257 rounded up to a multiple of 64, for tensor cores
    unpadded_vocab_size: int = 50257
    resid_pdrop: float | int = 0.0
    embd_pdrop: float | int = 0.0
    attn_pdrop: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.add_cross_attention:
            raise ValueError("add_cross_attention: not supported without an encoder. Remove it.")
        if self.unpadded_vocab_size > self.vocab_size:
            raise ValueError(
                f"unpadded_vocab_size {self.unpadded_vocab_size} is above vocab_size {self.vocab_size}."
            )


class PaddedVocabularyHead(nn.Linear):
    """A language model head whose logits past `num_tokens` are always the smallest number of the dtype.

    Loss, argmax and sampling ignore them, and their gradient is zero. Code that multiplies with
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
    """transformers' GPT-2 (with sdpa, flash or eager attention) with the padded head."""

    config: CptGPT2Config

    def __init__(self, config: CptGPT2Config) -> None:
        # GPT2LMHeadModel's own __init__ would build the plain head first.
        super(GPT2LMHeadModel, self).__init__(config)
        self.transformer = GPT2Model(config)
        self.lm_head = PaddedVocabularyHead(
            config.n_embd, config.vocab_size, config.unpadded_vocab_size
        )
        self.post_init()

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """Resize to `new_num_tokens` tokens; padding rows that become tokens start as the mean of the old tokens."""
        old_tokens = self.config.unpadded_vocab_size
        embeddings = super().resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        if new_num_tokens is None:
            return embeddings
        tables: list[nn.Embedding | nn.Linear] = [embeddings]
        if not self.config.tie_word_embeddings:
            tables.append(self.lm_head)
        with torch.no_grad():
            for table in tables:
                table.weight[old_tokens:] = table.weight[:old_tokens].mean(dim=0)
        self.config.unpadded_vocab_size = new_num_tokens
        head = PaddedVocabularyHead(self.config.n_embd, embeddings.weight.shape[0], new_num_tokens)
        head.weight = tables[-1].weight
        # transformers marks a head as initialized, so that `post_init` leaves it alone.
        for name, value in vars(self.lm_head).items():
            if name not in vars(head):
                vars(head)[name] = value
        self.lm_head = head
        return embeddings


def pad_vocabulary(state_dict: StateDict, rows: int) -> StateDict:
    """Pad a published GPT-2's token embedding to `rows` rows; new rows are the mean of the old ones."""
    padded = {}
    for name, tensor in state_dict.items():
        if name.endswith(VOCABULARY_TABLES) and tensor.shape[0] < rows:
            filling = tensor.float().mean(dim=0, keepdim=True).to(tensor.dtype)
            tensor = torch.cat([tensor, filling.expand(rows - tensor.shape[0], -1)])
        padded[name] = tensor
    return padded


@dataclass(frozen=True)
class Family:
    config: type[PreTrainedConfig]
    model: type[PreTrainedModel]
    native: type[PreTrainedConfig]
    """The architecture of transformers with the same logits."""
    starts_from: tuple[str, ...]
    """Model types of checkpoints that it can load. MiniMind's code uses `minimind`."""


FAMILIES = {
    "cpt-gpt2": Family(CptGPT2Config, CptGPT2ForCausalLM, GPT2Config, ("gpt2",)),
    "minimind2": Family(MiniMind2Config, MiniMind2ForCausalLM, LlamaConfig, ("llama", "minimind")),
    "minimind2_moe": Family(
        MiniMind2MoEConfig, MiniMind2MoEForCausalLM, Qwen2MoeConfig, ("minimind",)
    ),
    "minimind3": Family(MiniMind3Config, MiniMind3ForCausalLM, Qwen3Config, ("qwen3", "minimind")),
    "minimind3_moe": Family(
        MiniMind3MoEConfig, MiniMind3MoEForCausalLM, Qwen3MoeConfig, ("qwen3_moe", "minimind")
    ),
}


def register_families() -> None:
    """Register our families; idempotent. Call it before reading their configs or models."""
    for model_type, family in FAMILIES.items():
        AutoConfig.register(model_type, family.config, exist_ok=True)
        AutoModelForCausalLM.register(family.config, family.model, exist_ok=True)
    # As in Qwen3-MoE, experts are separate tensors on disk (MiniMind's names), and one tensor in memory.
    for model_type in ("minimind2_moe", "minimind3_moe"):
        experts = get_checkpoint_conversion_mapping("qwen3_moe")
        register_checkpoint_conversion_mapping(model_type, experts, overwrite=True)


# --- export ----------------------------------------------------------------------------------------------------------


def export_native(folder: Path) -> None:
    """Rewrite a saved model in place, so that plain `from_pretrained` loads it without cpt."""
    saved = json.loads((folder / "config.json").read_text())
    if saved["model_type"] not in FAMILIES:
        return
    config = FAMILIES[saved["model_type"]].config.from_dict(saved)
    # The other families have the same tensors.
    if isinstance(config, CptGPT2Config | MiniMind2MoEConfig):
        _rewrite_weights(folder, config)
    native_class = FAMILIES[config.model_type].native
    own_fields = {field.name for field in fields(config)}
    native_fields = {field.name for field in fields(native_class)}
    values: dict[str, Any] = {name: getattr(config, name) for name in own_fields & native_fields}
    architecture = cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[native_class]).__name__
    values |= {"architectures": [architecture], "use_cache": True}
    if isinstance(config, CptGPT2Config):
        values["vocab_size"] = config.unpadded_vocab_size
    if "num_experts" in values:
        # Both Qwen mixtures read `head_dim`, but do not declare it.
        values |= {"output_router_logits": False, "head_dim": config.head_dim}
    if isinstance(config, MiniMind2MoEConfig):
        # Qwen2-MoE without biases computes what MiniMind2's mixture does.
        values |= {
            "qkv_bias": False,
            "norm_topk_prob": config.norm_topk_prob,
            "moe_intermediate_size": config.moe_intermediate_size,
            "shared_expert_intermediate_size": config.intermediate_size * config.n_shared_experts,
        }
    native_class(**values).save_pretrained(folder)


def _rewrite_weights(folder: Path, config: CptGPT2Config | MiniMind2MoEConfig) -> None:
    """Replace the folder's safetensors (one file or shards with an index) by converted ones with the same largest file
    size."""
    old_files = sorted(folder.glob("model*.safetensors"))
    tensors: StateDict = {}
    for file in old_files:
        tensors |= load_file(file)
    if isinstance(config, CptGPT2Config):
        tokens = config.unpadded_vocab_size
        for name in tensors:
            if name.endswith(VOCABULARY_TABLES):
                tensors[name] = tensors[name][:tokens].clone()
    else:
        tensors = _with_one_shared_expert(tensors, config)
    largest = max(file.stat().st_size for file in old_files)
    indexes = folder.glob("model.safetensors.index.json")
    with replacing([*old_files, *indexes], folder) as scratch:
        save_torch_state_dict(tensors, scratch, max_shard_size=largest, metadata={"format": "pt"})


def _with_one_shared_expert(tensors: StateDict, config: MiniMind2MoEConfig) -> StateDict:
    """Write MiniMind2's shared experts as the one of Qwen2-MoE: concatenated, several equal a wide one."""
    converted: StateDict = {}
    for name, tensor in tensors.items():
        if ".shared_experts." not in name:
            converted[name] = tensor
    for layer in range(config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        gate = tensors[f"{mlp}.gate.weight"]
        # Qwen2-MoE multiplies its shared expert by a sigmoid. Zeros make the sigmoid 1/2, and doubled weights
        # cancel it exactly.
        converted[f"{mlp}.shared_expert_gate.weight"] = torch.zeros_like(gate[:1])
        no_rows = gate.new_empty((0, config.hidden_size))  # the result if there is no shared expert
        for projection, dim, factor in (("gate", 0, 1), ("up", 0, 1), ("down", 1, 2)):
            weights = [no_rows if dim == 0 else no_rows.t()]
            for expert in range(config.n_shared_experts):
                weights.append(tensors[f"{mlp}.shared_experts.{expert}.{projection}_proj.weight"])
            wide = factor * torch.cat(weights, dim=dim)
            converted[f"{mlp}.shared_expert.{projection}_proj.weight"] = wide
    return converted
