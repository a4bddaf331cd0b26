"""From a recipe to its stage's trainer, callbacks included."""

from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from cpt.data.prepared import PreparedData
from cpt.evaluation.retention import StopWhenForgetting
from cpt.evaluation.samples import PromptSamples
from cpt.monitoring.clock import TrainingClock
from cpt.monitoring.console import ConsoleProgress
from cpt.monitoring.run_files import MetricsFile, StatusFile
from cpt.monitoring.shares import RealisedShares
from cpt.recipe.schema import Recipe
from cpt.runs.record import Run
from cpt.stages.arguments import training_arguments
from cpt.stages.data_position import DataPosition
from cpt.stages.find import find_stage
from cpt.stages.length import run_length


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: TrainingArguments | None = None,
) -> Trainer:
    """The trainer of the recipe's stage, ready for `train()`.

    Args:
        arguments: Hugging Face's config; under ZeRO-3 it was made before the model, elsewhere it may be left out.

    Raises:
        RecipeError: no such stage, or a value that Hugging Face refuses.
    """
    if arguments is None:
        arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data)
    length = run_length(recipe, data.num_tokens)
    trainer: Trainer = find_stage(recipe.stage).build_trainer(recipe, model, tokenizer, data, arguments, length)
    folder = Path(str(arguments.output_dir))
    trainer.remove_callback(PrinterCallback)
    clock = TrainingClock(length.tokens_per_step)
    for callback in (
        clock,
        DataPosition(data, length.rows_per_step),
        RealisedShares(data, length.rows_per_step),
        MetricsFile(folder / "metrics.jsonl", length.tokens_per_step),
        StatusFile(Run(folder)),
        ConsoleProgress(folder.name),
    ):
        trainer.add_callback(callback)
    if recipe.evaluation.retain:
        trainer.add_callback(StopWhenForgetting(Run(folder), recipe.evaluation.retain))
    if recipe.evaluation.prompts:
        trainer.add_callback(PromptSamples(folder / "samples.jsonl", tokenizer, recipe.evaluation.prompts))
    return trainer
