"""Build the trainer of a recipe's stage, including callbacks."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from cpt.data.rows.build import PreparedData
from cpt.errors import RecipeError
from cpt.evaluation.scoring import PromptSamples, StopEarly, StopWhenForgetting
from cpt.optim.evaluation_point import EndsAtEvaluationPoint
from cpt.recipe.huggingface_keys import find_stage
from cpt.recipe.rules import OWN_LOSS, REWARDED, TAUGHT
from cpt.recipe.schema import Recipe
from cpt.runs.folder import METRICS, SAMPLES
from cpt.runs.record import Run
from cpt.stages.models import (
    PACKED,
    REFERENCED,
    SAMPLING,
    build_teacher,
    ends_of_answers,
    listed_ends,
    number_tokens_by_mask,
    reference_model,
)
from cpt.training.arguments import run_length, training_arguments
from cpt.training.callbacks import (
    ConsoleProgress,
    MetricsFile,
    StatusFile,
    StepProfile,
    build_callbacks,
    check_profiled_steps,
    guard_trackers,
)
from cpt.training.metrics import (
    MachineUse,
    ModelFlopsUtilization,
    RealisedShares,
    SmoothedLoss,
    TrainingClock,
)
from cpt.training.resuming import DataPosition
from cpt.training.source_losses import SourceLosses
from cpt.training.trainer import CPTTrainer

LANGUAGE_MODEL = ("cpt.training.trainer:CPTTrainer",)
TRAINERS: dict[str, tuple[str, ...]] = {
    "pretrain": LANGUAGE_MODEL,
    "cpt": LANGUAGE_MODEL,
    "sft": LANGUAGE_MODEL,
    "dpo": (
        "cpt.stages.examples:ExampleTrainer",
        "trl:DPOTrainer",
    ),  # arXiv 2305.18290, and others by `loss_type`
    "kto": ("cpt.stages.examples:JudgedAnswers", "trl:KTOTrainer"),  # arXiv 2402.01306
    "orpo": (
        "cpt.stages.examples:WithoutReference",
        "trl.experimental.orpo:ORPOTrainer",
    ),  # arXiv 2403.07691
    "cpo": (
        "cpt.stages.examples:WithoutReference",
        "trl.experimental.cpo:CPOTrainer",
    ),  # arXiv 2401.08417, SimPO
    "reward": ("cpt.stages.examples:WholeDialogues", "trl:RewardTrainer"),  # Bradley-Terry
    "grpo": ("cpt.stages.generating:Groups", "trl:GRPOTrainer"),  # arXiv 2402.03300
    "rloo": ("cpt.stages.generating:GenerationBatches", "trl:RLOOTrainer"),  # arXiv 2402.14740
    "ppo": ("cpt.contrib.rl.ppo:PPOTrainer",),
    "spo": ("cpt.contrib.rl.spo:SPOTrainer",),
    "distill": ("cpt.contrib.distillation.distill:DistillTrainer",),
    "distill_text": ("cpt.contrib.distillation.distill:DistillTrainer",),
    "distill_on_policy": ("cpt.stages.generating:StepsOfPrompts", "trl:DistillationTrainer"),
    "gkd": (
        "cpt.contrib.distillation.distill:WholeConversations",
        "trl.experimental.gkd:GKDTrainer",
    ),
}
"""Our trainer; or our mixin for a TRL trainer, and that trainer, whose loss, metrics and generation are kept."""
NEAR_BASE = "cpt.contrib.distillation.replay_kl:ReplayTrainer"  # for sources with `replay_kl`


def build_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: TrainingArguments | None = None,
    *,
    watchers: Sequence[TrainerCallback] = (),
) -> CPTTrainer:
    """Build the trainer of the recipe's stage, a `transformers.Trainer`. It writes checkpoints and metrics to
    `output_dir`/`name`.

    Args:
        arguments: Hugging Face's config; under ZeRO-3 it must be created before the model, otherwise it is optional.
        watchers: further callbacks.

    Raises:
        RecipeError: unknown stage, or a value that Hugging Face refuses.
    """
    if arguments is None:
        arguments = training_arguments(recipe, recipe.output_dir / recipe.name, data)
    folder = Path(str(arguments.output_dir))
    trainer = stage_trainer(recipe, model, tokenizer, data, arguments)
    if not isinstance(trainer, CPTTrainer):
        raise RecipeError(
            f"`stage`: {recipe.stage} builds a {type(trainer).__name__}, which does not save and resume as cpt runs"
            " do. Derive it from cpt.training.trainer.CPTTrainer."
        )
    trainer.remove_callback(PrinterCallback)
    guard_trackers(trainer, folder)
    position = DataPosition(data, trainer.rows_of_steps)
    trainer.stateful.append(position)
    for callback in (
        EndsAtEvaluationPoint(),
        position,
        *watching_callbacks(recipe, trainer, data),
        *watchers,
    ):
        trainer.add_callback(callback)
    if recipe.evaluation.retain:
        trainer.add_callback(StopWhenForgetting(Run(folder), recipe.evaluation.retain))
    if recipe.evaluation.stop is not None:
        trainer.add_callback(StopEarly(Run(folder), recipe.evaluation.stop))
    if recipe.evaluation.prompts:
        samples = PromptSamples(
            folder / SAMPLES,
            tokenizer,
            recipe.evaluation.prompts,
            before_each=trainer.call_prediction_step,
        )
        trainer.add_callback(samples)
    return trainer


def stage_trainer(
    recipe: Recipe,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData,
    arguments: Any,
) -> Trainer:
    length = run_length(recipe, data.num_rows, Path(arguments.output_dir))
    stage = find_stage(recipe.stage)
    other_models = dict[str, nn.Module | None]()
    if stage.build_trainer is not None:
        return stage.build_trainer(recipe, model, tokenizer, data, arguments, length)
    end_answers_at_turns(recipe, model, tokenizer, arguments)
    if recipe.stage in REFERENCED:
        other_models["ref_model"] = reference_model(recipe, tokenizer, arguments)
    elif recipe.stage in REWARDED:
        other_models["reference"] = (
            reference_model(recipe, tokenizer, arguments) if arguments.beta else None
        )
    elif recipe.stage in TAUGHT:
        other_models["teacher_model"] = build_teacher(recipe, model, tokenizer, arguments)
    if recipe.stage in SAMPLING:
        for read in (model, *other_models.values()):
            if read is not None:
                number_tokens_by_mask(read)
    common: dict[str, Any] = {
        "rows": data.rows,
        "length": length,
        "held_out": data.held_out,
        "tokenizer": tokenizer,
    }
    if recipe.data.share_near_base:
        base = reference_model(recipe, tokenizer, arguments)
        return resolve_name(NEAR_BASE)(recipe, model, arguments, **common, base=base)
    return trainer_class(recipe.stage)(recipe, model, arguments, **common, **other_models)


def end_answers_at_turns(
    recipe: Recipe, model: Any, tokenizer: PreTrainedTokenizerBase, arguments: Any
) -> None:
    """TRL's trainers end completions at the tokenizer's EOS and what the model's generation config has."""
    if recipe.stage == "reward" or model.generation_config is None:  # it writes no text
        return
    config = model.generation_config
    config.eos_token_id = ends_of_answers(config.eos_token_id, tokenizer, recipe)
    if "use_vllm" in vars(arguments) and arguments.use_vllm:  # it reads the base's own files
        stops = {"stop_token_ids": listed_ends(config.eos_token_id)}
        arguments.generation_kwargs = stops | (arguments.generation_kwargs or {})


@cache
def trainer_class(stage: str) -> Callable[..., Trainer]:
    bases = tuple(map(resolve_name, TRAINERS[stage]))
    if len(bases) == 1:
        return bases[0]
    return type(bases[1].__name__, bases, {})


def watching_callbacks(
    recipe: Recipe, trainer: CPTTrainer, data: PreparedData
) -> list[TrainerCallback]:
    """Build callbacks that add metrics, the recipe's, and those that write metrics."""
    monitoring = recipe.monitoring
    folder = trainer.run_folder
    tokens = trainer.length.tokens_per_step
    check_profiled_steps(monitoring.profile, trainer.length.steps)
    rows = trainer.rows_of_steps
    callbacks: list[TrainerCallback] = [
        TrainingClock(tokens),
        SmoothedLoss(),
        RealisedShares(data, rows),
    ]
    if data.form in PACKED and len(data.sources) > 1:
        callbacks.append(SourceLosses(data, rows, sharing_rows=trainer.shared_rows.parts))
    if recipe.stage in (
        *OWN_LOSS,
        "distill_text",
    ):  # one forward and backward pass per token, nothing else
        gpu = torch.cuda.get_device_name() if trainer.args.device.type == "cuda" else None
        callbacks.append(ModelFlopsUtilization(data, rows, gpu, recipe.model))
    callbacks += [MachineUse(folder), *build_callbacks(monitoring.callbacks, folder, tokens)]
    callbacks += [
        MetricsFile(folder / METRICS, tokens),
        StatusFile(Run(folder)),
        ConsoleProgress(folder.name),
    ]
    if recipe.evaluation.tasks_every_tokens is not None:
        callbacks.append(trainer.tasks)
    if monitoring.profile is not None:
        callbacks.append(StepProfile(folder, monitoring.profile))
    return callbacks
