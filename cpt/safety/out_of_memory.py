"""Out of memory: what counts as it, which micro-batch comes next, what the next start must know of it, and how all
ranks agree."""

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.utils.memory import should_reduce_batch_size

from cpt.runs.folder import read_object
from cpt.runs.record import write_json

log = logging.getLogger("cpt")
LEARNED = "learned.json"
MICRO_BATCH = "micro_batch"


class OtherRankOutOfMemoryError(RuntimeError):
    """Raised on the ranks that had memory enough, so that all redo the step together."""


def is_out_of_memory(problem: BaseException) -> bool:
    """True for the errors of torch's allocators on any device, and for their likes by message."""
    return isinstance(problem, torch.OutOfMemoryError | OtherRankOutOfMemoryError) or (
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
    """Let the next start begin with this micro-batch; on a full disk it has to learn it again."""
    path = folder / LEARNED
    learned = read_object(path, [])
    try:
        write_json(path, {**learned, MICRO_BATCH: {**learned.get(MICRO_BATCH, {}), str(processes): size}})
    except OSError as problem:
        log.warning("%s cannot be written: %s.", path, problem.strerror)


class MemoryVote:
    """Asks all ranks, once in a step and before their gradients meet, whether any is out of memory. Over gloo: no GPU
    waits for it."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")
        self.has_voted = False

    def any_is_out(self, *, mine: bool) -> bool:
        """The answer, the same on all ranks; each has to ask."""
        self.has_voted = True
        out = torch.tensor([int(mine)])
        dist.all_reduce(out, op=dist.ReduceOp.MAX, group=self.group)
        return bool(out.tolist()[0])
