"""Odds ratio preference optimisation (arXiv 2403.07691): TRL's experimental trainer on our rows."""

from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.experimental.orpo import ORPOConfig
from trl.experimental.orpo import ORPOTrainer as Experimental

from cpt.data.prepared import PreparedData
from cpt.recipe.schema import Recipe
from cpt.stages.length import RunLength
from cpt.stages.unreferenced import UnreferencedTrainer

CONFIG = ORPOConfig
COLUMNS = ("prompt", "chosen", "rejected")


class ORPOTrainer(UnreferencedTrainer, Experimental):  # type: ignore[misc]
    """TRL's ORPOTrainer as a run of ours."""


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: ORPOConfig,
    length: RunLength,
) -> ORPOTrainer:
    """The trainer of this stage."""
    return ORPOTrainer(
        recipe, model, arguments, rows=data.rows, length=length, held_out=data.held_out, tokenizer=tokenizer
    )
