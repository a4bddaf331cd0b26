"""Continued pre-training: next-token loss on packed documents, from trained weights."""

from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments

from cpt.data.prepared import PreparedData
from cpt.recipe.schema import Recipe
from cpt.stages.length import RunLength
from cpt.stages.trainer import CPTTrainer

CONFIG = TrainingArguments
COLUMNS = ("text",)


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: TrainingArguments,
    length: RunLength,
) -> CPTTrainer:
    """The trainer of this stage."""
    return CPTTrainer(
        recipe, model, arguments, rows=data.rows, length=length, held_out=data.held_out, tokenizer=tokenizer
    )
