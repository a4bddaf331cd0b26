"""Build Hugging Face's arguments from the recipe: the config of its stage, and the length of the run."""

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from cpt.data.rows.build import PreparedData, steps_of_epochs
from cpt.distributed import (
    groups_of_rows,
    is_main_process,
    world_size,
)
from cpt.errors import RecipeError
from cpt.hardware import triton_failure
from cpt.optim.adamw import automatic_dtype
from cpt.recipe.huggingface_keys import find_stage
from cpt.recipe.keys import DEFAULT_MICRO_BATCH, micro_batches_per_step
from cpt.recipe.rules import REWARDED
from cpt.recipe.schema import Recipe
from cpt.recipe.training_keys import why_refused
from cpt.training.callbacks import usable_trackers
from cpt.training.engine import parallelism_config
from cpt.training.engine_profiles import changes_in_memory, read_profile
from cpt.training.generations import check_generations, prompts_of_step
from cpt.training.restart import learned_micro_batch

log = logging.getLogger("cpt")
MUCH_MORE = 1.1  # times the budget: more by rounding up to whole steps causes a warning


@dataclass(frozen=True)
class RunLength:
    """The budget as a number of steps and of rows per step."""

    steps: int
    rows_per_step: int
    gradient_accumulation_steps: int
    tokens_per_step: int
    micro_batch: int  # rows per process at once: the recipe's, or smaller after out-of-memory

    @property
    def rows(self) -> int:
        return self.steps * self.rows_per_step

    @property
    def tokens(self) -> int:
        """The budget, rounded up to whole steps."""
        return self.steps * self.tokens_per_step

    def steps_between(self, every_tokens: int | None, every_steps: float | None) -> int | None:
        """The interval in optimizer steps; None if the recipe sets none."""
        if every_tokens is not None:
            return max(1, round(every_tokens / self.tokens_per_step))
        if every_steps is None or every_steps >= 1:
            if every_steps is None:
                return None
            return int(every_steps)
        return math.ceil(every_steps * self.steps)


def training_arguments(
    recipe: Recipe,
    folder: Path,
    data: PreparedData,
    *,
    deepspeed: str | Path | dict[str, Any] | None = None,
) -> TrainingArguments:
    """Build the stage's config. Under ZeRO-3 this must come before the model, which is then built partitioned.

    Args:
        folder: the run's folder.
        deepspeed: the active DeepSpeed profile, from the recipe or accelerate's config.
    """
    for problem in (why_refused(key, recipe.stage) for key in recipe.training):
        if problem is not None:
            raise RecipeError(problem)
    length = run_length(recipe, data.num_rows, folder)
    warn_of_rounding(recipe, length)
    config_class = find_stage(recipe.stage).CONFIG
    checkpoints = recipe.checkpoints
    evaluation = recipe.evaluation
    ours = {
        "output_dir": str(folder),
        "run_name": folder.name,
        "seed": recipe.seed,
        "max_steps": length.steps,
        "per_device_train_batch_size": length.micro_batch,
        "gradient_accumulation_steps": length.gradient_accumulation_steps,
        "learning_rate": recipe.optimizer.learning_rate,
        "report_to": usable_trackers(recipe.monitoring.trackers) or "none",
        "disable_tqdm": True,  # our console callback has the bar
        "logging_nan_inf_filter": False,  # True logs 0 for NaN, and waits for the GPU at each micro-batch
        "ignore_data_skip": True,  # our loader starts at the checkpoint's row
        "remove_unused_columns": False,
        "use_cpu": bool(recipe.training.get("use_cpu")) or not torch.accelerator.is_available(),
        "parallelism_config": parallelism_config(recipe.training),
        # Without an interval, save only at the end.
        "save_strategy": "steps",
        "save_steps": length.steps_between(checkpoints.every_tokens, checkpoints.every_steps)
        or length.steps,
        "save_total_limit": None,  # cpt removes old checkpoints: the Trainer sorts them by file time
        "eval_strategy": "no",
    }
    if (
        data.held_out
    ):  # without an interval, evaluate the first and the last step; the Trainer adds the last one
        every = length.steps_between(evaluation.every_tokens, evaluation.every_steps)
        ours |= {
            "eval_strategy": "steps",
            "eval_steps": every or length.steps,
            "eval_on_start": True,
        }
    if "project" in recipe.training:  # transformers only passes it to Trackio
        os.environ.setdefault("WANDB_PROJECT", recipe.training["project"])
    defaults = {
        "logging_steps": 10,
        "dataloader_pin_memory": torch.cuda.is_available(),
        # Hugging Face's default of 8 rows would run out of memory if the training batch only just fits.
        "per_device_eval_batch_size": recipe.training.get("per_device_train_batch_size", 8),
    }
    of_trl = {  # keys of TRL for keys of the recipe
        "max_length": recipe.data.sequence_length,
        "trust_remote_code": recipe.model.trust_remote_code,
    }
    names = config_class.__dataclass_fields__
    ours |= {key: value for key, value in of_trl.items() if key in names}
    if config_class is not TrainingArguments:  # TRL has other defaults; use the same for all stages
        defaults |= {"gradient_checkpointing": False, "bf16": False}
    theirs = with_whole_generations(recipe.training, length.micro_batch)
    if deepspeed:
        theirs["deepspeed"] = read_profile(deepspeed)
        if is_main_process():
            for change in changes_in_memory(deepspeed):
                log.warning(f"{change}.")
    try:
        arguments: TrainingArguments = config_class(**{**defaults, **theirs, **ours})
    except (ValueError, TypeError, ImportError) as problem:
        raise RecipeError(f"`training`: {config_class.__name__} says: {problem}") from problem
    if deepspeed:  # its measurement of the throughput waits for the GPU at each micro-batch
        arguments.hf_deepspeed_config.config.setdefault(
            "timers", {"throughput": {"enabled": False}}
        )
    return arguments


def limit_gpu_memory(share: float | None, arguments: TrainingArguments) -> None:
    """Let torch allocate at most this share of the GPU's memory in this process (`safety.max_gpu_memory`)."""
    if share is None:
        return
    if arguments.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(share, arguments.device)
    elif is_main_process():
        log.warning("`safety.max_gpu_memory` has no effect: the run uses no CUDA GPU.")


def weights_dtype(recipe: Recipe, arguments: TrainingArguments) -> torch.dtype:
    on_gpu = arguments.device.type == "cuda" and not triton_failure()
    return automatic_dtype(recipe, deepspeed=arguments.deepspeed is not None, on_gpu=on_gpu)


def with_whole_generations(training: Mapping[str, Any], micro_batch: int) -> dict[str, Any]:
    """Sample as many completions as the recipe says, also with a smaller micro-batch after out-of-memory."""
    steps = training.get("steps_per_generation")
    if steps is None:
        return dict(training)
    requested = int(training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
    return {**training, "steps_per_generation": steps * (requested // micro_batch)}


def warn_of_rounding(recipe: Recipe, length: RunLength) -> None:
    budget = recipe.budget.tokens
    if budget is not None and length.tokens > MUCH_MORE * budget and is_main_process():
        log.warning(
            f"The run trains {length.tokens:,} tokens in {length.steps:,} step(s) of {length.tokens_per_step:,}, more"
            f" than `budget.tokens`: {budget:,}. To get closer, lower `training.per_device_train_batch_size`,"
            " `budget.global_batch_tokens`."
        )


def run_length(recipe: Recipe, rows_of_sources: int, folder: Path | None = None) -> RunLength:
    """Compute the budget in optimizer steps, for the current number of processes.

    Args:
        rows_of_sources: rows of one epoch. Padding counts, so that an epoch reads each row once.
        folder: of the run, which may have a smaller micro-batch recorded after out-of-memory.
    """
    micro_batch = int(recipe.training.get("per_device_train_batch_size", 8))
    readers = groups_of_rows(
        recipe.training, world_size()
    )  # number of processes, if none share rows
    rows_at_once = micro_batch * readers
    accumulation = micro_batches_per_step(recipe, world_size())
    trained = rows_per_step = rows_at_once * accumulation
    if recipe.stage in REWARDED:  # a row is a prompt with several completions
        check_generations(recipe, world_size())
        rows_per_step = prompts_of_step(recipe, trained)
    tokens_per_step = trained * recipe.data.sequence_length
    if recipe.budget.tokens is None:
        steps = steps_of_epochs(
            recipe.data, recipe.budget.epochs or 0, rows_of_sources, rows_per_step
        )
    else:
        steps = math.ceil(recipe.budget.tokens / tokens_per_step)
    steps = max(1, steps)
    fits = learned_micro_batch(folder, world_size()) if folder is not None else None
    parts = micro_batch // fits if fits is not None and micro_batch % fits == 0 else 1
    return RunLength(
        steps, rows_per_step, accumulation * parts, tokens_per_step, micro_batch // parts
    )
