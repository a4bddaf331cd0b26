"""The callbacks that watch every run, in the order in which each can read what those before it add to the logs."""

from collections.abc import Sequence

import torch
from transformers import TrainerCallback

from cpt.data.prepared import PreparedData
from cpt.monitoring.callbacks import build_callbacks
from cpt.monitoring.console import ConsoleProgress
from cpt.monitoring.figures import RealisedShares, SmoothedLoss, TrainingClock
from cpt.monitoring.machine import MachineUse
from cpt.monitoring.profiler import StepProfile, check_profiled_steps
from cpt.monitoring.run_files import MetricsFile, StatusFile
from cpt.monitoring.source_losses import SourceLosses
from cpt.monitoring.utilization import ModelFlopsUtilization
from cpt.recipe.schema import Recipe
from cpt.runs.folder import METRICS
from cpt.runs.record import Run
from cpt.stages.model import PACKED
from cpt.stages.trainer import CPTTrainer

OWN_LOSS = ("pretrain", "cpt", "sft", "distill_text")
"""Stages whose steps are a language model's own forward and backward pass of each token, and nothing besides."""


def watching_callbacks(recipe: Recipe, trainer: CPTTrainer, data: PreparedData) -> list[TrainerCallback]:
    """Those that add figures, those of the recipe, then those that write the figures down.

    Raises:
        RecipeError: the recipe's own, or what it profiles, cannot be had.
    """
    monitoring, folder, tokens = recipe.monitoring, trainer.run_folder, trainer.length.tokens_per_step
    check_profiled_steps(monitoring.profile, trainer.length.steps)
    return [
        TrainingClock(tokens),
        SmoothedLoss(),
        RealisedShares(data, trainer.rows_of_steps),
        *callbacks_of_packed_rows(recipe, trainer, data),
        MachineUse(folder),
        *build_callbacks(monitoring.callbacks, folder, tokens),
        MetricsFile(folder / METRICS, tokens),
        StatusFile(Run(folder)),
        ConsoleProgress(folder.name),
        *(() if monitoring.profile is None else (StepProfile(folder, **monitoring.profile.model_dump()),)),
    ]


def callbacks_of_packed_rows(recipe: Recipe, trainer: CPTTrainer, data: PreparedData) -> Sequence[TrainerCallback]:
    """What only rows of tokens have."""
    callbacks: list[TrainerCallback] = []
    if data.form in PACKED and len(data.sources) > 1:
        callbacks.append(SourceLosses(data, trainer.rows_of_steps, sharing_rows=trainer.sharing_rows))
    if recipe.stage in OWN_LOSS:
        gpu = torch.cuda.get_device_name() if trainer.args.device.type == "cuda" else None
        trains_weights = recipe.model.lora is None and recipe.model.train_only is None
        callbacks.append(ModelFlopsUtilization(data, trainer.rows_of_steps, gpu, trains_weights=trains_weights))
    return callbacks
