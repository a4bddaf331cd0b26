"""From the recipe to Hugging Face's own training arguments: our keys put in their words, theirs passed on unchanged."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from cpt.data.build import PreparedData
from cpt.errors import RecipeError
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe
from cpt.stages.find import find_stage


@dataclass(frozen=True)
class RunLength:
    """How many steps of how many rows the budget makes."""

    steps: int
    rows_per_step: int
    gradient_accumulation_steps: int
    tokens_per_step: int

    @property
    def rows(self) -> int:
        """Rows of the whole run."""
        return self.steps * self.rows_per_step

    @property
    def tokens(self) -> int:
        """Tokens of the whole run: the budget, rounded up to whole steps."""
        return self.steps * self.tokens_per_step

    def steps_between(self, every_tokens: int | None, every_steps: int | None) -> int | None:
        """An interval of the recipe in optimizer steps; None where the recipe gives none."""
        return every_steps if every_tokens is None else max(1, round(every_tokens / self.tokens_per_step))


def run_length(recipe: Recipe, tokens_of_sources: int) -> RunLength:
    """The budget in optimizer steps, for the number of processes that run now.

    Args:
        tokens_of_sources: tokens of all sources once; one epoch.

    Raises:
        RecipeError: the global batch does not divide into micro-batches over the processes.
    """
    micro_batch = int(recipe.training.get("per_device_train_batch_size", 8))
    rows_at_once = micro_batch * world_size()
    if recipe.budget.global_batch_tokens is None:
        accumulation = int(recipe.training.get("gradient_accumulation_steps", 1))
    else:
        accumulation, rest = divmod(recipe.budget.global_batch_tokens, rows_at_once * recipe.data.sequence_length)
        if rest or not accumulation:
            raise RecipeError(
                f"`budget.global_batch_tokens` is {recipe.budget.global_batch_tokens:,}, which does not divide into "
                f"{world_size()} process(es) x per_device_train_batch_size {micro_batch} x sequence_length {recipe.data.sequence_length:,} "
                f"= {rows_at_once * recipe.data.sequence_length:,} tokens. Make it a multiple of that."
            )
    rows_per_step = rows_at_once * accumulation
    tokens_per_step = rows_per_step * recipe.data.sequence_length
    tokens = recipe.budget.tokens if recipe.budget.tokens is not None else (recipe.budget.epochs or 0) * tokens_of_sources
    return RunLength(max(1, math.ceil(tokens / tokens_per_step)), rows_per_step, accumulation, tokens_per_step)


def training_arguments(
    recipe: Recipe,
    folder: Path,
    data: PreparedData,
    *,
    deepspeed: str | Path | dict[str, Any] | None = None,
) -> TrainingArguments:
    """Build the stage's config. Under ZeRO-3 this must come before the model, which then builds itself in parts.

    Args:
        folder: the run's folder.
        deepspeed: the DeepSpeed profile in force: the recipe's, or the one that accelerate's own config names.

    Raises:
        RecipeError: Hugging Face refuses a value under `training:`.
    """
    length = run_length(recipe, data.num_tokens)
    config_class = find_stage(recipe.stage).CONFIG
    ours = {
        "output_dir": str(folder),
        "run_name": folder.name,
        "seed": recipe.seed,
        "max_steps": length.steps,
        "gradient_accumulation_steps": length.gradient_accumulation_steps,
        "learning_rate": recipe.optimizer.learning_rate,
        "report_to": recipe.monitoring.trackers or "none",
        "disable_tqdm": True,  # our console callback has the bar
        "logging_nan_inf_filter": False,  # it logs loss 0 for a run that is lost, and waits for the GPU at each micro-batch
        "ignore_data_skip": True,  # our loader starts at the row where the checkpoint stands
        "remove_unused_columns": False,
        "use_cpu": bool(recipe.training.get("use_cpu")) or not torch.accelerator.is_available(),
        **saving_arguments(recipe, length),
        **evaluation_arguments(recipe, length, evaluates=bool(data.held_out)),
    }
    if recipe.monitoring.project:
        ours["project"] = recipe.monitoring.project
        os.environ.setdefault("WANDB_PROJECT", recipe.monitoring.project)
    defaults = {"logging_steps": 10, "dataloader_pin_memory": torch.cuda.is_available()}
    theirs = {**recipe.training, **({"deepspeed": str(deepspeed) if isinstance(deepspeed, Path) else deepspeed} if deepspeed else {})}
    try:
        return config_class(**{**defaults, **theirs, **ours})
    except (ValueError, TypeError, ImportError) as problem:
        raise RecipeError(f"`training`: {config_class.__name__} says: {problem}") from problem


def saving_arguments(recipe: Recipe, length: RunLength) -> dict[str, Any]:
    """Without an interval only the end is saved."""
    every = length.steps_between(recipe.checkpoints.every_tokens, recipe.checkpoints.every_steps)
    return {"save_strategy": "steps", "save_steps": every or length.steps, "save_total_limit": recipe.checkpoints.keep}


def evaluation_arguments(recipe: Recipe, length: RunLength, *, evaluates: bool) -> dict[str, Any]:
    """Without an interval the first and the last step are evaluated; the Trainer adds the last one by itself."""
    if not evaluates:
        return {"eval_strategy": "no"}
    every = length.steps_between(recipe.evaluation.every_tokens, recipe.evaluation.every_steps)
    return {"eval_strategy": "steps", "eval_steps": every or length.steps, "eval_on_start": True}


def weights_dtype(recipe: Recipe, arguments: TrainingArguments) -> torch.dtype:
    """What `model.dtype: auto` means: bfloat16 where DeepSpeed keeps fp32 master weights or the weights are frozen."""
    if arguments.bf16 and (arguments.deepspeed is not None or recipe.model.lora is not None):
        return torch.bfloat16
    return torch.float32
