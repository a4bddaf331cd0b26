"""Run a trainer from a checkpoint or from the beginning, and adapt the recipe to a checkpoint."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.checkpoints.load import refuse_other_engine
from cpt.checkpoints.manifest import POSITION, Manifest
from cpt.checkpoints.model_folder import Tensors
from cpt.checkpoints.resume import ResumePoint
from cpt.checkpoints.sharding import PLAIN, is_zero, make_universal, remove_universal, sharding_of
from cpt.data.readers.comparing import COMPARISON, FIRST_COMPARISON
from cpt.data.rows.build import PreparedData
from cpt.data.rows.loader import ReadAhead
from cpt.data.rows.mixture import RowsOfSteps
from cpt.distributed import groups_of_rows, is_main_process, main_process_decides, world_size
from cpt.errors import (
    CheckpointError,
    CptError,
    Interrupted,
    LaunchError,
    RestartNeeded,
    TrainingError,
)
from cpt.recipe.keys import DEFAULT_MICRO_BATCH
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.training.callbacks import StatusFile
from cpt.training.contents import count_processes
from cpt.training.liveness import lost_others, resumes_from
from cpt.training.trainer import CPTTrainer

log = logging.getLogger("cpt")


def train_from(trainer: CPTTrainer, point: ResumePoint) -> None:
    """Train from this point of the run; raises CheckpointError if the checkpoint is of another engine."""
    trainer.point = point
    folder = trainer.run_folder
    checkpoint = point.checkpoint
    manifest = point.manifest
    if is_main_process():
        remove_universal(folder)
    if checkpoint is None:
        trainer.train()
        return
    refuse_other_engine(checkpoint, trainer.sharding)
    if manifest is not None and manifest.world_size != world_size():
        warn_elastic(folder, manifest)
        if is_zero(trainer.sharding):
            original = checkpoint
            checkpoint = main_process_decides(
                lambda: make_universal(original, folder, trust=point.trusted)
            )
    step = f", after step {manifest.step:,}" if manifest is not None else ""
    log.info(f"Resuming from {point.checkpoint}{step}.")
    trainer.train(resume_from_checkpoint=str(checkpoint))
    if is_main_process():
        remove_universal(folder)


@contextmanager
def saved_on_errors(trainer: CPTTrainer) -> Iterator[None]:
    """Save the last finished step on an exception, as far as possible, and name the checkpoint to resume from."""
    try:
        yield
    except (RestartNeeded, Interrupted, TrainingError, CheckpointError, LaunchError):
        raise  # these have saved what is good, or could not
    except Exception as problem:
        if lost_others(problem):
            raise
        step = trainer.state.global_step
        folder = trainer.run_folder
        unsaved = trainer.save_after_error()
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, StatusFile):
                callback.on_save(trainer.args, trainer.state, trainer.control)
        where = resumes_from(folder)
        if unsaved:
            where = f"Step {step} could not be saved: {unsaved}. {where}"
        if is_main_process() and not isinstance(problem, CptError):
            failure = f"The run failed after step {step}: {type(problem).__name__}: {problem}."
            record_event(folder, "failed", f"{failure} {where}", step=step)
        elif unsaved:
            log.warning(where)
        raise


class DataPosition(TrainerCallback):
    """Prefetches data during training; its state, the position in the data, is in each checkpoint."""

    file = POSITION

    def __init__(self, data: PreparedData, rows: RowsOfSteps) -> None:
        self.data = data
        self.rows = rows
        self.progress = TrainerState()  # of the training, once it begins
        self.ahead: ReadAhead | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Start preparing the next chunks, in one process per machine."""
        self.progress = state
        if args.local_process_index == 0:
            self.ahead = self.data.read_ahead(self.rows.first(state.global_step))
            if self.ahead is not None:
                self.ahead.start()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.ahead is not None:
            self.ahead.stop()

    def state_dict(self) -> dict[str, Any]:
        """The position of the next row to train on."""
        return self.data.state(self.rows.first(self.progress.global_step))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises DataError if the data have changed since."""
        self.data.restore(state_dict)


def keep_global_batch(recipe: Recipe, point: ResumePoint) -> Recipe:
    """Return the recipe with as many rows per step as at the beginning of the run, by adapting accumulation."""
    manifest = point.manifest
    if manifest is None or not manifest.step or recipe.budget.global_batch_tokens is not None:
        return recipe
    tokens = manifest.tokens // manifest.step
    micro_batch = int(recipe.training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH))
    accumulation = int(recipe.training.get("gradient_accumulation_steps", 1))
    readers = groups_of_rows(recipe.training, world_size())
    if tokens == micro_batch * accumulation * readers * recipe.data.sequence_length:
        return recipe
    return recipe.model_copy(
        update={"budget": recipe.budget.model_copy(update={"global_batch_tokens": tokens})}
    )


def keep_dtype(recipe: Recipe, point: ResumePoint, *, deepspeed: bool) -> Recipe:
    """Return the recipe with the checkpoint's dtype instead of `model.dtype: auto`, which may differ here.

    Weights of an engine and adapters are always fp32.
    """
    is_plain = not deepspeed and not recipe.training.get("fsdp") and recipe.model.lora is None
    if (
        recipe.model.dtype != "auto"
        or not is_plain
        or point.checkpoint is None
        or point.manifest is None
    ):
        return recipe
    if sharding_of(point.manifest) != PLAIN:
        return recipe
    stored = set(Tensors(point.checkpoint).dtypes.values())
    if stored not in ({torch.bfloat16}, {torch.float32}):
        return recipe
    dtype = str(stored.pop()).removeprefix("torch.")
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})


def comparison_of(point: ResumePoint) -> int:
    """How the data of the checkpoint were compared with evaluation documents; the newest way for a new run."""
    if point.checkpoint is None or not (point.checkpoint / POSITION).exists():
        return COMPARISON
    return int(
        json.loads((point.checkpoint / POSITION).read_text()).get("comparison", FIRST_COMPARISON)
    )


def warn_elastic(folder: Path, manifest: Manifest) -> None:
    if is_main_process():
        record_event(
            folder,
            "elastic",
            f"The run resumes with {count_processes(world_size())} instead of {manifest.world_size} from step"
            f" {manifest.step}: the same rows per step, equal up to rounding; dropout uses other random numbers.",
            step=manifest.step,
            processes=world_size(),
            processes_before=manifest.world_size,
        )
