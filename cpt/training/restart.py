"""Restart a run with what it learned: the micro-batch that fits, the rows that a roll-back leaves out.

A run learns by ending: `learned.json` tells its next start. One process restarts by itself; several are restarted by
their launcher (`--processes`, `--supervise`, torchrun, SLURM).
"""

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate.utils.memory import should_reduce_batch_size

from cpt.errors import RestartNeeded
from cpt.ranks import same_command, tell, world_size
from cpt.runs.folder import read_object
from cpt.runs.record import write_json

log = logging.getLogger("cpt")
LEARNED = "learned.json"
MICRO_BATCH, ROLLBACK = "micro_batch", "rollback"
RESTARTS = "CPT_RESTARTS"  # in the environment: how many restarts in a row had the same reason, and the reason
MOST_WITHOUT_PROGRESS = 3  # without progress: a step, a smaller micro-batch or another roll-back changes the reason


def restart(problem: RestartNeeded, words: Sequence[str]) -> NoReturn:
    """Replace this process by the same command, which starts with an empty GPU.

    Args:
        words: of `cpt train`.

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
    tell(str(problem))
    os.environ[RESTARTS] = f"{count} {problem}"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "cpt", "train", *words])


def is_out_of_memory(problem: BaseException) -> bool:
    """True for the errors of torch's allocators on any device, and for similar ones by message."""
    return isinstance(problem, torch.OutOfMemoryError) or (
        isinstance(problem, Exception) and should_reduce_batch_size(problem)
    )


def smaller_micro_batch(micro_batch: int) -> int | None:
    """Half of it, or the next smaller size that divides it; None where one row is all there is."""
    return next((size for size in range(micro_batch // 2, 0, -1) if micro_batch % size == 0), None)


def learned_micro_batch(folder: Path, processes: int) -> int | None:
    """The largest micro-batch that fitted, where a larger one did not, for so many processes."""
    try:
        size = read_object(folder / LEARNED, [])[MICRO_BATCH].get(str(processes))
    except (KeyError, AttributeError):  # not there, or damaged
        return None
    return size if isinstance(size, int) and size > 0 else None


def remember_micro_batch(folder: Path, processes: int, size: int) -> None:
    """Let the next start begin with this micro-batch."""
    known = read_object(folder / LEARNED, []).get(MICRO_BATCH, {})
    remember(folder, MICRO_BATCH, {**known, str(processes): size})


def learned_rollback(folder: Path) -> dict[str, Any] | None:
    """The last roll-back: `to_step`, the rows that are `left_out` since, and the skip `budget`."""
    found = read_object(folder / LEARNED, []).get(ROLLBACK)
    return found if isinstance(found, dict) and {"to_step", "left_out", "budget"} <= found.keys() else None


def remember_rollback(folder: Path, to_step: int, left_out: Sequence[tuple[int, int]], budget: dict[str, Any]) -> None:
    """Let the start that resumes from this step leave out these rows."""
    remember(folder, ROLLBACK, {"to_step": to_step, "left_out": left_out, "budget": budget})


def forget_rollback(folder: Path) -> None:
    """The run begins before it, so its checkpoints of the same numbers will be others."""
    remember(folder, ROLLBACK, None)


def remember(folder: Path, key: str, value: Any) -> None:
    """On a full disk the next start has to learn it again."""
    path = folder / LEARNED
    try:
        write_json(path, {**read_object(path, []), key: value})
    except OSError as problem:
        log.warning("%s cannot be written: %s.", path, problem.strerror)
