"""REINFORCE leave-one-out (arXiv 2402.14740): TRL's trainer on our prompts."""

from collections.abc import Mapping
from typing import Any

import trl
from torch import nn
from transformers import PreTrainedTokenizerBase

from cpt.data.prepared import PreparedData
from cpt.recipe.schema import Recipe
from cpt.stages.length import RunLength
from cpt.stages.sampling.generation_batches import GenerationBatches, reference_for
from cpt.stages.sampling.generations import prompts_of_step

CONFIG = trl.RLOOConfig
COLUMNS = ("prompt",)


class RLOOTrainer(GenerationBatches, trl.RLOOTrainer):  # type: ignore[misc]
    """TRL's RLOOTrainer as a run of ours."""


def rows_of_step(training: Mapping[str, Any], rows: int) -> int:
    """Prompts in an optimizer step of so many completions."""
    return prompts_of_step(CONFIG, training, rows)


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: trl.RLOOConfig,
    length: RunLength,
) -> RLOOTrainer:
    """The trainer of this stage; its reference, where `beta` asks for one, is the model as the run found it."""
    reference = reference_for(recipe, tokenizer, arguments)
    return RLOOTrainer(
        recipe,
        model,
        arguments,
        rows=data.rows,
        length=length,
        held_out=data.held_out,
        tokenizer=tokenizer,
        reference=reference,
    )
