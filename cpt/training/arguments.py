"""From the recipe to Hugging Face's own training arguments: our keys put in their words, theirs passed on
unchanged."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from cpt.data.build import PreparedData
from cpt.errors import RecipeError
from cpt.optim.adamw import automatic_dtype
from cpt.recipe.schema import Recipe
from cpt.training.find_stage import find_stage
from cpt.training.length import RunLength, length_of, tell_rounding
from cpt.training.parallel_groups import parallelism_config


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
    length = length_of(recipe, data, folder)
    tell_rounding(recipe, length)
    config_class = find_stage(recipe.stage).CONFIG
    ours = {
        "output_dir": str(folder),
        "run_name": folder.name,
        "seed": recipe.seed,
        "max_steps": length.steps,
        "per_device_train_batch_size": length.micro_batch,
        "gradient_accumulation_steps": length.gradient_accumulation_steps,
        "learning_rate": recipe.optimizer.learning_rate,
        "report_to": recipe.monitoring.trackers or "none",
        "disable_tqdm": True,  # our console callback has the bar
        "logging_nan_inf_filter": False,  # True logs 0 for a lost run, and waits for the GPU at each micro-batch
        "ignore_data_skip": True,  # our loader starts at the row where the checkpoint stands
        "remove_unused_columns": False,
        "use_cpu": bool(recipe.training.get("use_cpu")) or not torch.accelerator.is_available(),
        "parallelism_config": parallelism_config(recipe.training),
        **saving_arguments(recipe, length),
        **evaluation_arguments(recipe, length, evaluates=bool(data.held_out)),
    }
    if "project" in recipe.training:  # transformers passes it to Trackio alone
        os.environ.setdefault("WANDB_PROJECT", recipe.training["project"])
    defaults = {
        "logging_steps": 10,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # Hugging Face's default of 8 rows would run out of memory where the training's batch just fits.
        "per_device_eval_batch_size": recipe.training.get("per_device_train_batch_size", 8),
    }
    fields = config_class.__dataclass_fields__
    if "max_length" in fields:
        ours["max_length"] = recipe.data.sequence_length
    if config_class is not TrainingArguments:  # TRL has other defaults; here all stages have the same
        defaults |= {"gradient_checkpointing": False, "bf16": False}
    theirs = dict(recipe.training)
    if deepspeed:
        theirs["deepspeed"] = str(deepspeed) if isinstance(deepspeed, Path) else deepspeed
    try:
        return config_class(**{**defaults, **theirs, **ours})
    except (ValueError, TypeError, ImportError) as problem:
        raise RecipeError(f"`training`: {config_class.__name__} says: {problem}") from problem


def saving_arguments(recipe: Recipe, length: RunLength) -> dict[str, Any]:
    """Without an interval only the end is saved. Which checkpoints stay is not the Trainer's to say: it goes by the
    files' times."""
    every = length.steps_between(recipe.checkpoints.every_tokens, recipe.checkpoints.every_steps)
    return {"save_strategy": "steps", "save_steps": every or length.steps, "save_total_limit": None}


def evaluation_arguments(recipe: Recipe, length: RunLength, *, evaluates: bool) -> dict[str, Any]:
    """Without an interval the first and the last step are evaluated; the Trainer adds the last one by itself."""
    if not evaluates:
        return {"eval_strategy": "no"}
    every = length.steps_between(recipe.evaluation.every_tokens, recipe.evaluation.every_steps)
    return {"eval_strategy": "steps", "eval_steps": every or length.steps, "eval_on_start": True}


def weights_dtype(recipe: Recipe, arguments: TrainingArguments) -> torch.dtype:
    """What `model.dtype: auto` means in this process."""
    return automatic_dtype(recipe, deepspeed=arguments.deepspeed is not None, on_gpu=arguments.device.type == "cuda")
