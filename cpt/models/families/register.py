"""Our families, and making them known to AutoConfig and AutoModelForCausalLM."""

from dataclasses import dataclass

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from cpt.models.families.gpt2 import CptGPT2Config, CptGPT2ForCausalLM
from cpt.models.families.minimind import MiniMind2Config, MiniMind2ForCausalLM, MiniMind3Config, MiniMind3ForCausalLM
from cpt.models.families.minimind_moe import (
    MiniMind2MoEConfig,
    MiniMind2MoEForCausalLM,
    MiniMind3MoEConfig,
    MiniMind3MoEForCausalLM,
)


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
