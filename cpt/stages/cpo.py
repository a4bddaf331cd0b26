"""Contrastive preference optimisation (arXiv 2401.08417) and SimPO (`loss_type: simpo`): TRL's experimental trainer on
our rows."""

from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.experimental.cpo import CPOConfig
from trl.experimental.cpo import CPOTrainer as Experimental

from cpt.data.prepared import PreparedData
from cpt.recipe.schema import Recipe
from cpt.stages.length import RunLength
from cpt.stages.unreferenced import UnreferencedTrainer

CONFIG = CPOConfig
COLUMNS = ("prompt", "chosen", "rejected")


class CPOTrainer(UnreferencedTrainer, Experimental):  # type: ignore[misc]
    """TRL's CPOTrainer as a run of ours."""


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: CPOConfig,
    length: RunLength,
) -> CPOTrainer:
    """The trainer of this stage."""
    return CPOTrainer(
        recipe, model, arguments, rows=data.rows, length=length, held_out=data.held_out, tokenizer=tokenizer
    )
