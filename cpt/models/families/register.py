"""Make our families known to AutoConfig and AutoModelForCausalLM."""

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from cpt.models.families.gpt2 import CptGPT2Config, CptGPT2ForCausalLM
from cpt.models.families.minimind import MiniMind2Config, MiniMind2ForCausalLM, MiniMind3Config, MiniMind3ForCausalLM
from cpt.models.families.minimind_moe import (
    MiniMind2MoEConfig,
    MiniMind2MoEForCausalLM,
    MiniMind3MoEConfig,
    MiniMind3MoEForCausalLM,
)

FAMILIES: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "cpt-gpt2": (CptGPT2Config, CptGPT2ForCausalLM),
    "minimind2": (MiniMind2Config, MiniMind2ForCausalLM),
    "minimind2_moe": (MiniMind2MoEConfig, MiniMind2MoEForCausalLM),
    "minimind3": (MiniMind3Config, MiniMind3ForCausalLM),
    "minimind3_moe": (MiniMind3MoEConfig, MiniMind3MoEForCausalLM),
}


def register_families() -> None:
    """Idempotent: call it before any config or model of ours is read."""
    for model_type, (config_class, model_class) in FAMILIES.items():
        AutoConfig.register(model_type, config_class, exist_ok=True)
        AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    for model_type in ("minimind2_moe", "minimind3_moe"):
        # On disk each expert has its own tensors (MiniMind's names), in memory they are one: the conversion is
        # Qwen3-MoE's.
        register_checkpoint_conversion_mapping(
            model_type, get_checkpoint_conversion_mapping("qwen3_moe"), overwrite=True
        )
