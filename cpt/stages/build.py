"""From a recipe to its stage's trainer, callbacks included."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from cpt.data.prepared import PreparedData
from cpt.errors import RecipeError
from cpt.evaluation.retention import StopWhenForgetting
from cpt.evaluation.samples import PromptSamples
from cpt.monitoring.trackers import put_trackers_last
from cpt.recipe.schema import Recipe
from cpt.runs.folder import SAMPLES
from cpt.runs.record import Run
from cpt.stages.arguments import training_arguments
from cpt.stages.find import find_stage
from cpt.stages.length import length_of
from cpt.stages.resuming import DataPosition
from cpt.stages.trainer import CPTTrainer
from cpt.stages.watching import watching_callbacks


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: TrainingArguments | None = None,
    *,
    watchers: Sequence[TrainerCallback] = (),
) -> CPTTrainer:
    """The trainer of the recipe's stage, ready for `train()`.

    Args:
        arguments: Hugging Face's config; under ZeRO-3 it was made before the model, elsewhere it may be left out.
        watchers: further callbacks, of whoever runs it.

    Raises:
        RecipeError: no such stage, a value that Hugging Face refuses, or a stage of the user's own that builds on
        another trainer.
    """
    if arguments is None:
        arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data)
    length = length_of(recipe, data, Path(str(arguments.output_dir)))
    trainer: Trainer = find_stage(recipe.stage).build_trainer(recipe, model, tokenizer, data, arguments, length)
    if not isinstance(trainer, CPTTrainer):
        raise RecipeError(
            f"`stage`: {recipe.stage} builds a {type(trainer).__name__}, which does not save and resume as runs here"
            " do. Derive it from cpt.stages.trainer.CPTTrainer."
        )
    folder = Path(str(arguments.output_dir))
    trainer.remove_callback(PrinterCallback)
    for callback in (DataPosition(data, trainer.rows_of_steps), *watching_callbacks(recipe, trainer, data), *watchers):
        trainer.add_callback(callback)
    if recipe.evaluation.retain:
        trainer.add_callback(StopWhenForgetting(Run(folder), recipe.evaluation.retain))
    if recipe.evaluation.prompts:
        samples = PromptSamples(
            folder / SAMPLES, tokenizer, recipe.evaluation.prompts, before_each=trainer.tell_prediction_step
        )
        trainer.add_callback(samples)
    put_trackers_last(trainer, folder)
    return trainer
