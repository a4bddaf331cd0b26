"""Build the Trainer's arguments from the recipe: the stage's config, the run's length, shared rows."""

import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from accelerate.parallelism_config import ParallelismConfig
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from cpt.data.rows.build import PreparedData, steps_of_epochs
from cpt.data.rows.mixture import RowRange, shift_past_skipped
from cpt.distributed import (
    KEY,
    TENSOR_PARALLEL,
    groups_of_rows,
    is_main_process,
    read_parallelism,
    world_size,
)
from cpt.errors import RecipeError
from cpt.hardware import triton_failure
from cpt.models.attention import check_shared_rows, choose_attention
from cpt.models.layers import wanted_compiling
from cpt.optim.adamw import automatic_dtype
from cpt.plugins import import_user_module
from cpt.recipe.huggingface_keys import BUILT_IN_COLUMNS, STAGE_CONFIGS
from cpt.recipe.keys import AUTO, DEFAULT_MICRO_BATCH, micro_batches_per_step
from cpt.recipe.rules import OWN_LOSS, REWARDED
from cpt.recipe.schema import Recipe
from cpt.recipe.training_keys import why_refused
from cpt.training.callbacks import usable_trackers
from cpt.training.engine_profiles import Profile, changes_in_memory, read_profile, zero_section
from cpt.training.restart import learned_micro_batch

PARTS = ("CONFIG", "COLUMNS", "build_trainer")

log = logging.getLogger("cpt")
MUCH_MORE = 1.1  # times the budget: more by rounding up to whole steps causes a warning
UNPROVEN = {
    "tp_size": f"{TENSOR_PARALLEL}.",
    "cp_size": "documents of a packed row would attend to each other. Use `sp_size`, which separates them.",
    **dict.fromkeys(
        ("dp_replicate_size", "dp_shard_size"),
        "FSDP2 and ZeRO split over all processes. Remove it; for fast links within a machine ZeRO-3 has"
        ' "zero_hpz_partition_size".',
    ),
}


@dataclass(frozen=True)
class Stage:
    CONFIG: Any
    COLUMNS: tuple[str, ...]
    build_trainer: Callable[..., Trainer] | None = None  # for custom stages


def find_stage(name: str) -> Stage:
    """Return a built-in stage, or a custom `package.module`.

    Raises:
        RecipeError: the module does not exist, or lacks one of CONFIG, COLUMNS, build_trainer.
    """
    if name in STAGE_CONFIGS:
        return Stage(resolve_name(STAGE_CONFIGS[name]), BUILT_IN_COLUMNS[name])
    module = import_user_module(name)
    missing = [part for part in PARTS if part not in vars(module)]
    if missing:
        raise RecipeError(
            f"`stage`: `{name}` lacks {', '.join(missing)}. A stage is a module with {', '.join(PARTS)}."
        )
    return Stage(module.CONFIG, tuple(module.COLUMNS), build_trainer=module.build_trainer)


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
            return None if every_steps is None else int(every_steps)
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
    config_class, checkpoints, evaluation = (
        find_stage(recipe.stage).CONFIG,
        recipe.checkpoints,
        recipe.evaluation,
    )
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
    theirs = dict(recipe.training)
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


def parallelism_config(training: Mapping[str, Any]) -> ParallelismConfig | None:
    parts = read_parallelism(training).sp_size
    if parts == 1:
        return None
    groups = groups_of_rows(training, world_size())
    return ParallelismConfig(
        sp_size=parts,
        dp_replicate_size=groups,
        dp_shard_size=1,
        tp_size=1,
        cp_size=1,
        sp_backend="deepspeed",
    )


def check_parallelism(
    recipe: Recipe,
    profile: Profile | None,
    model: PreTrainedModel | None,
    *,
    processes: int,
    elsewhere: bool,
) -> None:
    """Refuse settings that train differently from one process, or are not tested against it.

    Args:
        model: on the meta device, if it could be built.
        processes: number of processes; 1 before the run starts.
        elsewhere: the run is for another machine, which decides `model.attention: auto`.
    """
    sizes = read_parallelism(recipe.training)
    for key, reason in UNPROVEN.items():
        if asdict(sizes)[key] > 1:
            raise RecipeError(f"`training.{KEY}.{key}` is not supported: {reason}")
    if sizes.sp_size == 1:
        return
    if processes > 1:
        groups_of_rows(recipe.training, processes)
    key = f"`training.{KEY}.sp_size`"
    data, problem = recipe.data, ""
    if profile is None or not zero_section(profile).get("stage"):
        problem = "shared rows need DeepSpeed. Write `training.deepspeed` with a profile of ZeRO-1, 2 or 3."
    elif recipe.stage not in OWN_LOSS:
        problem = f"the loss of stage `{recipe.stage}` needs whole rows. Use {', '.join(OWN_LOSS)}. Remove it."
    elif data.sequence_length % sizes.sp_size:
        problem = f"{sizes.sp_size} does not divide `data.sequence_length` {data.sequence_length:,}. Use a divisor."
    elif data.packing == "token_budget":
        problem = (
            "with `data.packing: token_budget` batches differ in length. Use `best_fit` or `none`."
        )
    elif wanted_compiling(recipe.training) is not None:
        problem = "compiled layers are not tested with split rows. Remove `training.torch_compile`."
    if problem:
        raise RecipeError(f"{key}: {problem}")
    if model is not None and not (elsewhere and recipe.model.attention == "auto"):
        half = bool(recipe.training.get("bf16") or recipe.training.get("fp16"))
        attention = choose_attention(
            recipe.model.attention,
            type(model),
            config=model.config,
            half_precision=half,
            packed=True,
        )
        check_shared_rows(model.config, sizes.sp_size, attention)


# --- prompts of a generation, and the micro-batches that train on them ---


Prompt = dict[str, Any]  # a data row: `prompt`, and the columns for rewards


@dataclass(frozen=True)
class Generations:
    """A generation: prompts that all processes sample at once, each `num_generations` times.

    Its completions are split into micro-batches and used `num_iterations` times. A generation spans several steps, or
    a step spans several generations; the ratio must be an integer, so that each step starts at the same point after a
    resume.
    """

    prompts: int  # per generation, over all processes
    micro_batches: int  # per process and generation
    accumulation: int  # micro-batches per process and step


def prompts_of_step(recipe: Recipe, completions: int) -> int:
    """Return the prompts per step; `completions` are those per step, over all processes."""
    return completions // (answers_of(recipe) * times_used(recipe))


def check_generations(recipe: Recipe, processes: int) -> None:
    """Refuse sizes of batches that do not hold whole groups of answers to a prompt, with sizes that do.

    Each step trains on whole groups, each generation samples whole groups, and one of the two lasts a whole number of
    times as long as the other.
    """
    training = recipe.training
    answers, times = answers_of(recipe), times_used(recipe)
    accumulation = micro_batches_per_step(recipe, processes)
    micro_batch = training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH)
    at_once = processes * (1 if micro_batch == AUTO else int(micro_batch))
    if answers < 2 and recipe.stage in ("grpo", "rloo"):
        raise RecipeError("`training.num_generations`: answers are compared: write at least 2.")
    completions, group = at_once * accumulation, answers * times
    if completions % group:
        steps = next(n for n in count(accumulation) if at_once * n % group == 0)
        remedy = f"`training.gradient_accumulation_steps: {steps}`"
        if recipe.budget.global_batch_tokens is not None:
            tokens = at_once * steps * recipe.data.sequence_length
            remedy = f"`budget.global_batch_tokens: {tokens}`"
        dividing = [n for n in range(2, completions + 1) if completions % (n * times) == 0]
        if dividing:
            nearest = min(dividing, key=lambda number: abs(number - answers))
            remedy += f", or `training.num_generations: {nearest}`"
        raise RecipeError(
            f"`training.num_generations`: a step trains on {completions} completions, {at_once} at once x"
            f" {accumulation} micro-batches, not a multiple of"
            f" num_generations {answers} x num_iterations {times}. Write {remedy}."
        )
    if micro_batch != AUTO:
        check_length_of_generation(training, answers, times, at_once, accumulation)
    in_evaluation = training.get("per_device_eval_batch_size", micro_batch)
    answers = training.get("num_generations_eval") or answers
    has_sets = recipe.evaluation.held_out_share is not None or bool(recipe.evaluation.perplexity)
    if has_sets and in_evaluation != AUTO and processes * int(in_evaluation) % answers:
        rows = next(n for n in count(int(in_evaluation)) if processes * n % answers == 0)
        raise RecipeError(
            f"`training.per_device_eval_batch_size`: {in_evaluation} rows on {processes} process(es) are not whole"
            f" groups of {answers} answers to a prompt. Write `training.per_device_eval_batch_size: {rows}`."
        )


def check_length_of_generation(
    training: Mapping[str, Any], answers: int, times: int, at_once: int, accumulation: int
) -> None:
    size, lasts = training.get("generation_batch_size"), training.get("steps_per_generation")
    if size is None and lasts is None:
        return
    if size is not None and lasts is not None:
        raise RecipeError(
            "`training.steps_per_generation` and `training.generation_batch_size` set the same thing. Remove one."
        )

    def fits(steps: int) -> bool:
        used = steps * times
        is_even = used % accumulation == 0 or accumulation % used == 0
        return is_even and at_once * steps % answers == 0

    steps, rest = divmod(int(size), at_once) if size is not None else (int(lasts or 1), 0)
    if not rest and steps and fits(steps):
        return
    fitting = next(number for number in count(max(steps, 1)) if fits(number))
    key, value = "steps_per_generation", fitting
    if size is not None:
        key, value = "generation_batch_size", fitting * at_once
    raise RecipeError(
        f"`training.{key}`: {training[key]}: a generation is whole groups of {answers} answers, {at_once} at once, and"
        f" lasts for whole steps of {accumulation} micro-batches, or divides one. Write `training.{key}: {value}`."
    )


def answers_of(recipe: Recipe) -> int:
    return of_config(recipe, "num_generations")


def times_used(recipe: Recipe) -> int:
    return of_config(recipe, "num_iterations")


def of_config(recipe: Recipe, key: str) -> int:
    """Return a number of `training:`, or the default of the stage's config."""
    defaults = {field.name: field.default for field in fields(find_stage(recipe.stage).CONFIG)}
    return int(recipe.training.get(key, defaults[key]))


class PromptRows(Dataset[list[Prompt]]):
    """One item per micro-batch and process: all prompts of its generation, the same on all processes.

    Only a generation's first micro-batch uses them. The others have them for runs that resume without completions.
    """

    def __init__(
        self, rows: Dataset[Prompt], plan: Generations, world_size: int, left_out: list[RowRange]
    ) -> None:
        self.rows, self.plan, self.world_size, self.left_out = rows, plan, world_size, left_out
        self.last: tuple[int, list[Prompt]] = (-1, [])

    def __getitem__(self, number: int) -> list[Prompt]:
        generation = number // self.world_size // self.plan.micro_batches
        if self.last[0] != generation:
            first = generation * self.plan.prompts
            numbers = [
                shift_past_skipped(row, self.left_out)
                for row in range(first, first + self.plan.prompts)
            ]
            self.last = generation, [self.rows[row] for row in numbers]
        return self.last[1]
