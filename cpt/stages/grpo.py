"""Group relative policy optimisation (arXiv 2402.03300) and its relatives, by `training.loss_type`: TRL's trainer on
our prompts."""

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

CONFIG = trl.GRPOConfig
COLUMNS = ("prompt",)


class GRPOTrainer(GenerationBatches, trl.GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer as a run of ours."""

    def own_state(self) -> dict[str, Any]:
        """What an adaptive entropy bonus has learned."""
        return {"entropy": [self.entropy_coef, self._last_world_entropy]} if self.use_adaptive_entropy else {}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self.entropy_coef, self._last_world_entropy = state["entropy"]


def rows_of_step(training: Mapping[str, Any], rows: int) -> int:
    """Prompts in an optimizer step of so many completions."""
    return prompts_of_step(CONFIG, training, rows)


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: trl.GRPOConfig,
    length: RunLength,
) -> GRPOTrainer:
    """The trainer of this stage; its reference, where `beta` asks for one, is the model as the run found it."""
    reference = reference_for(recipe, tokenizer, arguments)
    return GRPOTrainer(
        recipe,
        model,
        arguments,
        rows=data.rows,
        length=length,
        held_out=data.held_out,
        tokenizer=tokenizer,
        reference=reference,
    )
