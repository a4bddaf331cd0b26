"""Direct preference optimisation (arXiv 2305.18290) and its relatives, by `training.loss_type`: TRL's trainer on our
rows."""

import trl
from torch import nn
from transformers import PreTrainedTokenizerBase

from cpt.data.prepared import PreparedData
from cpt.recipe.schema import Recipe
from cpt.stages.examples import ExampleTrainer
from cpt.stages.length import RunLength
from cpt.stages.model import reference_model

CONFIG = trl.DPOConfig
COLUMNS = ("prompt", "chosen", "rejected")


class DPOTrainer(ExampleTrainer, trl.DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer as a run of ours."""


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: trl.DPOConfig,
    length: RunLength,
) -> DPOTrainer:
    """The trainer of this stage; its reference is the model as the run found it."""
    reference = reference_model(recipe, tokenizer, arguments)
    return DPOTrainer(
        recipe,
        model,
        arguments,
        rows=data.rows,
        length=length,
        held_out=data.held_out,
        tokenizer=tokenizer,
        ref_model=reference,
    )
