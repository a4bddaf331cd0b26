"""A model whose code is the user's, for Hugging Face's server, which looks for a class by its name in transformers and
nowhere else."""

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def can_be_served(architecture: str) -> bool:
    """Whether the server will find the class: transformers' own, or one that is registered with AutoModelForCausalLM.

    The server of transformers 5.23 takes `getattr(transformers, architecture)` (cli/serving/model_manager.py), so a
    registered one is put there.
    """
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    registered = {
        found.__name__: found for found in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()
    }  # values() imports all models
    if architecture not in registered:
        return False
    setattr(transformers, architecture, registered[architecture])
    return True
