"""Restart a run with a smaller micro-batch after out-of-memory, or without rows after a roll-back.

The next start reads these values from `learned.json`. A single process restarts itself; several processes are
restarted by their launcher (`--processes`, `--supervise`, torchrun, SLURM).
"""

import gc
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from cpt.distributed import print_once, rank, same_command, world_size
from cpt.errors import ResourceError, RestartNeeded
from cpt.files import sealed, write_atomic
from cpt.hardware import GIB
from cpt.process import MOST_WITHOUT_PROGRESS
from cpt.recipe.schema import Component
from cpt.runs.events import record_event
from cpt.runs.folder import LEARNED
from cpt.runs.history import read_learned
from cpt.training.loss_guard import handler_of

if TYPE_CHECKING:
    from cpt.training.trainer import CPTTrainer

log = logging.getLogger("cpt")
MICRO_BATCH, ROLLBACK = "micro_batch", "rollback"
RESTARTS = "CPT_RESTARTS"  # in the environment: number of consecutive restarts with the same reason, and the reason


def restart(problem: RestartNeeded, words: Sequence[str]) -> NoReturn:
    """Replace this process by the same command (`words` of `cpt train`), to free the GPU.

    Raises:
        RestartNeeded: the run has several processes or is supervised, so its launcher may restart it; or it was
            restarted three times without progress.
    """
    number, _, reason = os.environ.get(RESTARTS, "").partition(" ")
    count = int(number) + 1 if reason == str(problem) else 1
    if "CPT_SUPERVISED" in os.environ:
        raise problem
    if world_size() > 1 or count > MOST_WITHOUT_PROGRESS:
        raise RestartNeeded(f"{problem} {same_command()} does so.") from problem
    print_once(str(problem))
    os.environ[RESTARTS] = f"{count} {problem}"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "cpt", "train", *words])


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
    known = read_learned(folder).get(MICRO_BATCH, {})
    remember(folder, MICRO_BATCH, {**known, str(processes): size})


def learned_rollback(folder: Path) -> dict[str, Any] | None:
    """The last roll-back: `to_step`, the rows `left_out`, and the skip `budget`."""
    found: dict[str, Any] | None = read_learned(folder).get(ROLLBACK)
    return found


def remember(folder: Path, key: str, value: Any) -> None:
    """Write to `learned.json`; if the disk is full, the next start repeats the discovery."""
    path = folder / LEARNED
    try:
        content = sealed({**read_learned(folder), key: value}, indent=2)
        write_atomic(path, f"{content}\n", reuse_space=True)
    except OSError as problem:
        log.warning("%s cannot be written: %s.", path, problem.strerror)


def run_until_out_of_memory(trainer: "CPTTrainer", train_epoch: Callable[[], None]) -> None:
    """The Trainer's loop; out-of-memory restarts with smaller micro-batches, or raises an error with the remedy."""
    arguments = trainer.args
    needed: RestartNeeded | None = None
    try:
        train_epoch()
    except RuntimeError as problem:
        if is_out_of_memory(problem):
            needed = learn_smaller_batch(trainer, problem)
        else:
            learned = learned_micro_batch(trainer.run_folder, arguments.world_size)
            if (
                arguments.world_size == 1
                or learned is None
                or learned >= arguments.per_device_train_batch_size
            ):
                raise
            raise RestartNeeded(
                f"Another process ran out of memory in step {trainer.state.global_step + 1}: the run restarts"
                f" with micro-batches of {learned} from its last checkpoint."
            ) from problem
    if needed is None:
        return
    # Outside of `except`: no error keeps the tensors of its frames alive any more.
    trainer.model.zero_grad()
    gc.collect()
    clear_device_cache()
    unsaved = trainer.checkpointer.save_last_step()
    if unsaved:
        log.warning("Step %d could not be saved: %s.", trainer.state.global_step, unsaved)
    raise needed


def refuse_evaluation(trainer: "CPTTrainer", problem: RuntimeError) -> None:
    if not is_out_of_memory(problem):
        return
    batch_size = trainer.args.per_device_eval_batch_size
    remedy = "Lower `training.per_device_eval_batch_size`"
    if batch_size == 1:
        remedy = "Lower `data.sequence_length`, or split the model over GPUs"
    raise ResourceError(
        f"out of memory in the evaluation of step {trainer.state.global_step} with {batch_size} row(s) at"
        f" once. {remedy}."
    ) from problem


@dataclass(frozen=True)
class OutOfMemory:
    """A step that ran out of memory, as a handler (`safety.on_oom`) gets it."""

    step: int
    micro_batch: int  # rows
    peak_memory_gib: float | None  # of this process's GPU; None on a CPU
    run_folder: Path


def peak_memory_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def find_oom_handler(section: Component) -> Callable[[OutOfMemory], str | None]:
    """Return the handler with its options; it raises TrainingError instead of returning an unknown action."""
    actions = ("split_batch", "abort")
    return handler_of(section, "safety.on_oom", actions, default="split_batch")


def learn_smaller_batch(trainer: "CPTTrainer", problem: RuntimeError) -> RestartNeeded:
    """Halve the micro-batch and double accumulation at the next start: the rows per step do not change.

    Raises:
        ResourceError: the micro-batch is one row, or the recipe forbids it.
    """
    arguments, step = trainer.args, trainer.state.global_step + 1
    before, length = arguments.per_device_train_batch_size, trainer.recipe.data.sequence_length
    section, size = trainer.recipe.safety.on_oom, None
    event = OutOfMemory(step, before, peak_memory_gib(arguments.device), trainer.run_folder)
    if find_oom_handler(section)(event) != "abort":
        size = smaller_micro_batch(before)
    if size is not None and trainer.guard.released is None:
        remember_micro_batch(trainer.run_folder, arguments.world_size, size)
        message = (
            f"Out of memory in step {step} on process {rank()} with micro-batches of {before}: the run restarts"
            f" with micro-batches of {size}."
        )
        folder = trainer.run_folder
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
    other = "use a DeepSpeed profile with offload"
    if trainer.guard.released is not None:
        other = "`optimizer.release_gradients: false`, which allows splitting a step"
    elif before > 1:
        other = f"`safety.on_oom: split_batch` instead of `{section.name}`"
    where = (
        f"out of memory in step {step} with micro-batches of {before} row(s) of {length:,} tokens"
    )
    raise ResourceError(f"{where}. {remedy}, or {other}.") from problem
