"""Restart a run with a smaller micro-batch after out-of-memory, or without rows after a roll-back.

The next start reads these values from `learned.json`. A single process restarts itself; several processes are
restarted by their launcher (`--processes`, `--supervise`, torchrun, SLURM).
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils.memory import should_reduce_batch_size
from transformers import TrainingArguments

from cpt.checkpoints.resume import newest_intact, published_checkpoints, set_aside, step_of
from cpt.data.rows.mixture import RowRange
from cpt.distributed import (
    is_main_process,
    main_process_decides,
    print_once,
    rank,
    replace_process,
    same_command,
    world_size,
)
from cpt.errors import Interrupted, ResourceError, RestartNeeded
from cpt.files import sealed, write_atomic
from cpt.hardware import GIB
from cpt.interrupts import SUPERVISED
from cpt.process import MOST_WITHOUT_PROGRESS, is_without_progress
from cpt.recipe.schema import Component, Recipe
from cpt.runs.events import record_event
from cpt.runs.folder import LEARNED
from cpt.runs.history import read_learned
from cpt.training.guards import Decision, StepGuard
from cpt.training.loss_guard import handler_of

log = logging.getLogger("cpt")
MICRO_BATCH = "micro_batch"
ROLLBACK = "rollback"
RESTARTS = (
    "CPT_RESTART_REASONS"  # in the environment: the reasons of this process's restarts, as JSON
)


def restart(problem: RestartNeeded, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the same command (`arguments` of `cpt train`), to free the GPU.

    Raises:
        RestartNeeded: the run has several processes or is supervised, so its launcher may restart it; or it was
            restarted three times without progress.
    """
    reasons = [*json.loads(os.environ.get(RESTARTS, "[]")), str(problem)]
    if SUPERVISED in os.environ:
        raise problem
    if world_size() > 1 or is_without_progress(reasons):
        raise RestartNeeded(f"{problem} {same_command()} does so.") from problem
    print_once(str(problem))
    os.environ[RESTARTS] = json.dumps(reasons[-MOST_WITHOUT_PROGRESS:])
    replace_process(["cpt", "train", *arguments])


def is_out_of_memory(problem: BaseException) -> bool:
    """True for the errors of torch's allocators on any device, and for similar errors, by message."""
    if isinstance(problem, torch.OutOfMemoryError):
        return True
    # accelerate reads the first argument as a message, but some of torch's errors have another object there.
    return isinstance(problem, RuntimeError) and should_reduce_batch_size(
        RuntimeError(str(problem))
    )


def smaller_micro_batch(micro_batch: int) -> int | None:
    """Half of it, or the next smaller divisor; None for a single row."""
    return next((size for size in range(micro_batch // 2, 0, -1) if micro_batch % size == 0), None)


def learned_micro_batch(folder: Path, processes: int) -> int | None:
    """The micro-batch after out-of-memory, for this number of processes."""
    size: int | None = read_learned(folder).get(MICRO_BATCH, {}).get(str(processes))
    return size


def remember_micro_batch(folder: Path, processes: int, size: int) -> None:
    sizes = read_learned(folder).get(MICRO_BATCH, {})
    remember(folder, MICRO_BATCH, {**sizes, str(processes): size})


def remember(folder: Path, key: str, value: Any) -> None:
    """Write to `learned.json`; if the disk is full, the next start repeats the discovery."""
    path = folder / LEARNED
    try:
        content = sealed({**read_learned(folder), key: value}, indent=2)
        write_atomic(path, f"{content}\n", reuse_space=True)
    except OSError as problem:
        log.warning("%s cannot be written: %s.", path, problem.strerror)


def restart_after(
    problem: RuntimeError,
    recipe: Recipe,
    arguments: TrainingArguments,
    *,
    step: int,
    can_split: bool,
) -> RestartNeeded:
    """Return the restart with a smaller micro-batch that an out-of-memory error needs; raise other errors.

    Args:
        step: in which it happened.
        can_split: whether a step can have more micro-batches.

    Raises:
        RestartNeeded: another process ran out of memory.
        ResourceError: the micro-batch cannot be smaller.
    """
    if is_out_of_memory(problem):
        return learn_smaller_batch(problem, recipe, arguments, step=step, can_split=can_split)
    learned = learned_micro_batch(Path(str(arguments.output_dir)), arguments.world_size)
    is_smaller = learned is not None and learned < arguments.per_device_train_batch_size
    if arguments.world_size == 1 or not is_smaller:
        raise problem
    raise RestartNeeded(
        f"Another process ran out of memory in step {step}: the run restarts with micro-batches of {learned} from its"
        " last checkpoint."
    ) from problem


def refuse_evaluation(problem: RuntimeError, *, step: int, batch_size: int) -> None:
    """Raise ResourceError with the remedy if an evaluation ran out of memory."""
    if not is_out_of_memory(problem):
        return
    remedy = "Lower `training.per_device_eval_batch_size`"
    if batch_size == 1:
        remedy = "Lower `data.sequence_length`, or split the model over GPUs"
    raise ResourceError(
        f"out of memory in the evaluation of step {step} with {batch_size} row(s) at once. {remedy}."
    ) from problem


@dataclass(frozen=True)
class OutOfMemory:
    """A step that ran out of memory, as a handler (`safety.on_oom`) gets it."""

    step: int
    micro_batch: int  # rows
    peak_memory_gib: float | None  # of this process's GPU; None on a CPU
    run_folder: Path


def peak_memory_gib(device: torch.device) -> float | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    return None


def find_oom_handler(section: Component) -> Callable[[OutOfMemory], str | None]:
    """Return the handler with its options; it raises TrainingError instead of returning an unknown action."""
    actions = ("split_batch", "abort")
    return handler_of(section, "safety.on_oom", actions, default="split_batch")


def learn_smaller_batch(
    problem: RuntimeError,
    recipe: Recipe,
    arguments: TrainingArguments,
    *,
    step: int,
    can_split: bool,
) -> RestartNeeded:
    """Halve the micro-batch and double accumulation at the next start: the rows per step do not change.

    Raises:
        ResourceError: the micro-batch is one row, or the recipe forbids it.
    """
    folder = Path(str(arguments.output_dir))
    before = arguments.per_device_train_batch_size
    section = recipe.safety.on_oom
    event = OutOfMemory(step, before, peak_memory_gib(arguments.device), folder)
    size = None
    if find_oom_handler(section)(event) != "abort":
        size = smaller_micro_batch(before)
    if size is not None and can_split:
        remember_micro_batch(folder, arguments.world_size, size)
        message = (
            f"Out of memory in step {step} on process {rank()} with micro-batches of {before}: the run restarts"
            f" with micro-batches of {size}."
        )
        record_event(
            folder,
            "out_of_memory",
            message,
            step=step,
            micro_batch=size,
            before=before,
            restart=True,
        )
        return RestartNeeded(message)
    remedy = "Set `training.gradient_checkpointing: true`, or lower `data.sequence_length`"
    if before > 1:
        remedy = f"Write `training.per_device_train_batch_size: {before // 2}`"
    alternative = "use a DeepSpeed profile with offload"
    if not can_split:
        alternative = "`optimizer.release_gradients: false`, which allows splitting a step"
    elif before > 1:
        alternative = f"`safety.on_oom: split_batch` instead of `{section.name}`"
    raise ResourceError(
        f"out of memory in step {step} with micro-batches of {before} row(s) of {recipe.data.sequence_length:,}"
        f" tokens. {remedy}, or {alternative}."
    ) from problem


# --- go back to the last good checkpoint before bad steps, without their rows ---


def roll_back(decision: Decision, guard: StepGuard, folder: Path, *, is_stopping: bool) -> None:
    """Leave the roll-back for the next start; no save may be in flight.

    Without an older checkpoint the run continues: the skipped updates never changed its weights.

    Args:
        folder: of the run.
        is_stopping: a signal asked the run to stop.

    Raises:
        RestartNeeded: there is such a checkpoint.
        Interrupted: the same, for a run that is stopping.
    """
    checkpoint = main_process_decides(lambda: newest_intact(folder, up_to=decision.first_step - 1))
    consequence = "continues, because no checkpoint is older"
    if checkpoint is not None:
        consequence = f"resumes from {checkpoint.name} without their rows"
    message = f"{decision.reason}: the run {consequence}."
    if is_main_process():
        record_event(
            folder,
            "rolled_back",
            message,
            step=decision.step,
            to_step=None if checkpoint is None else step_of(checkpoint),
            left_out=decision.left_out,
            rollbacks=guard.budget.rollbacks,
        )
    if checkpoint is None:
        return
    guard.rows.leave_out(decision.left_out)
    main_process_decides(lambda: leave_for_next_start(folder, checkpoint, guard))
    if is_stopping:
        raise Interrupted(f"{message} {same_command()} continues.")
    raise RestartNeeded(message)


def leave_for_next_start(folder: Path, checkpoint: Path, guard: StepGuard) -> None:
    to_step = step_of(checkpoint)
    rollback = {
        "to_step": to_step,
        "left_out": guard.rows.left_out,
        "budget": guard.budget.state(),
    }
    remember(folder, ROLLBACK, rollback)
    later = [path for path in published_checkpoints(folder) if step_of(path) > to_step]
    set_aside(folder, later, f"the run went back to {checkpoint.name}")


def take_up_roll_back(guard: StepGuard, folder: Path, first_step: int) -> bool:
    """Leave out the rows of a roll-back to this step, whose checkpoint predates it; return whether there is one."""
    rollback: dict[str, Any] | None = read_learned(folder).get(ROLLBACK)
    if rollback is None or rollback["to_step"] < first_step:
        return False
    if rollback["to_step"] > first_step:
        if is_main_process():  # new checkpoints will reuse the numbers
            remember(folder, ROLLBACK, None)
        return False
    left_out: list[RowRange] = [(first, end) for first, end in rollback["left_out"]]
    guard.rows.left_out = left_out
    guard.budget.restore(rollback["budget"])
    return True
