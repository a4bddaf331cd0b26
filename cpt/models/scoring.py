"""A model that gives a text one score: a language model's body with a new linear head."""

from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from cpt.errors import RecipeError
from cpt.models.adapters import add_lora
from cpt.models.build import build_model
from cpt.models.zero3 import without_zero3
from cpt.recipe.schema import Model

HEAD = "score"


def check_scoring(config: PreTrainedConfig) -> None:
    """Refuse architectures that nobody wrote a scoring model for."""
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise RecipeError(
            f"`stage` reward: transformers has no sequence classifier for `{config.model_type}`. Choose a model of"
            " another architecture, such as llama or qwen3."
        )


def scoring_model(
    model: Model, tokenizer: PreTrainedTokenizerBase, *, seed: int = 42, dtype: torch.dtype = torch.float32
) -> PreTrainedModel | PeftModel:
    """The recipe's model with a head of one output, read at a text's last token.

    The body has the weights that the recipe names; the head is drawn from the seed.
    """
    whole = build_model(model.model_copy(update={"lora": None}), tokenizer, seed=seed, dtype=dtype)
    assert isinstance(whole, PreTrainedModel), "without adapters"
    config = whole.config
    check_scoring(config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    kind: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    with without_zero3(), torch.device("meta"):  # its body is not wanted
        scoring: PreTrainedModel = kind(config)
    setattr(scoring, scoring.base_model_prefix, getattr(whole, whole.base_model_prefix))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(scoring.get_submodule(HEAD).in_features, 1, bias=False)  # type: ignore[arg-type]
        nn.init.normal_(head.weight, std=config.get_text_config().initializer_range)
        setattr(scoring, HEAD, head.to(dtype))
        if model.lora is None:
            return scoring
        torch.manual_seed(seed)
        return add_lora(scoring, {**model.lora, "task_type": "SEQ_CLS", "modules_to_save": [HEAD]})
