"""Let all processes of a run do one thing, or none of them: a failure on one is raised on all."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from cpt.errors import CheckpointError
from cpt.ranks import is_main_process, rank, world_size

Result = TypeVar("Result")
Reason = Literal["storage", "not finite", "error"]


class NotFiniteError(Exception):
    """Weights that no checkpoint should hold."""


class SaveFailed(CheckpointError):  # noqa: N818  # it reads as what happened
    """A checkpoint was not published; every process raises the same.

    Args:
        reason: storage: the disk is full, gone or read-only, so a later try may do better. not finite: the weights
            hold NaN or infinity.
    """

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Agreement:
    """The run's processes, connected once more, so that a thread can agree while the training uses the other
    connections.

    Args:
        timeout: how long a process waits for the others.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.group = None if self.alone else dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, mine: Result) -> list[Result]:
        """What each process gives, on every process, by rank."""
        if self.alone:
            return [mine]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    @property
    def size(self) -> int:
        """How many processes there are."""
        return 1 if self.alone else dist.get_world_size()

    def collect(self, mine: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Send each process's tensor to the main process; every process must call it.

        Args:
            rows: on the main process, in host memory: takes them, by rank.
        """
        if rows is not None:
            others = [dist.irecv(as_bytes(rows[number]), number, group=self.group) for number in range(1, self.size)]
            rows[0].copy_(mine)
            for other in others:
                assert other is not None, "the main process belongs to the group"
                other.wait()
        else:
            dist.send(as_bytes(mine.cpu()), 0, group=self.group)

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """Each process's result of `work`, on every process.

        Raises:
            SaveFailed: it failed on one of them; raised on all.
        """
        result: Result | None = None
        cause: Exception | None = None
        failure: tuple[Reason, str] | None = None
        try:
            result = work()
        except Exception as problem:  # the others wait to hear of any
            whose = f"process {rank()}: " if world_size() > 1 else ""
            cause, failure = problem, (reason_of(problem), f"{whose}{in_words(problem)}")
        answers = self.gather((result, failure))
        for _, failure in answers:
            if failure is not None:
                raise SaveFailed(*failure) from cause
        return [result for result, _ in answers]  # type: ignore[misc]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """The main process's result of `work`, on every process.

        Raises:
            SaveFailed: it failed there; raised on all.
        """
        return self.together(lambda: work() if is_main_process() else None)[0]  # type: ignore[return-value]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; gloo does not know all dtypes."""
    return tensor.contiguous().view(torch.uint8)


def reason_of(problem: BaseException) -> Reason:
    """What kind of failure this is."""
    if isinstance(problem, SaveFailed):
        return problem.reason
    if isinstance(problem, NotFiniteError):
        return "not finite"
    is_of_storage = (
        isinstance(problem, OSError) or isinstance(problem, SafetensorError) and "os error" in str(problem).lower()
    )
    return "storage" if is_of_storage else "error"


def in_words(problem: BaseException) -> str:
    """A sentence's part about it, with the file where there is one."""
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.strerror}{f' ({problem.filename})' if problem.filename else ''}"
    if isinstance(problem, CheckpointError | NotFiniteError | OSError):
        return str(problem)
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
