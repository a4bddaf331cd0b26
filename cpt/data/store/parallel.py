"""Map a function over arguments in worker processes, with results in order.

Uses loky: spawned workers of the standard library would import the user's `__main__` again (torch and DeepSpeed in
`cpt/train.py`), and a script without a main guard would start itself again."""

import atexit
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from cpt.errors import ResourceError
from cpt.hardware import count_cpu_cores
from cpt.hf_internals import exit_now
from cpt.process import die_with_parent

if TYPE_CHECKING:
    from loky.process_executor import ProcessPoolExecutor

POOL_BYTES = 32 * 2**20  # of files; below this, starting processes takes longer than the work
# An option of loky's own process, which warns if a signal ended this one; it frees what is left.
NO_LEAKS = "ignore:resource_tracker:UserWarning"
Argument = TypeVar("Argument")
Result = TypeVar("Result")


def map_in_order(
    prepare: Callable[[], Callable[[Argument], Result]],
    arguments: Iterable[Argument],
    num_workers: int,
    imports: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield the results in the order of the arguments; the first failing argument's error is raised.

    Args:
        prepare: returns the function, which must be picklable. Called while the workers start.
        arguments: consumed lazily, a few ahead of the workers.
        num_workers: number of processes; 0 runs everything in this process.
        imports: modules that workers import when they start, if installed.

    Raises:
        ResourceError: a worker died, most likely out of memory.
    """
    arguments = iter(arguments)
    first = next(arguments, None)
    if first is None:
        return
    arguments = chain([first], arguments)
    if num_workers == 0:
        yield from map(prepare(), arguments)
        return
    from loky.process_executor import BrokenProcessPool  # takes 0.1 s

    workers = take_workers(num_workers, imports)
    waiting: deque[Future[Result]] = deque()
    try:
        with interrupts_blocked():
            workers.submit(int)  # starts the workers
        function = pickle.dumps(prepare())
        for argument in arguments:
            waiting.append(workers.submit(call, function, argument))
            if len(waiting) > num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        if SHARED.idle is None:
            workers.shutdown()
        else:
            SHARED.idle.append((num_workers, workers))
    except BrokenProcessPool as problem:
        raise ResourceError(
            "a worker process for reading and tokenising documents died, most likely out of memory "
            f"({' '.join(str(problem).split())[:300]}). Finished work is stored. Run it again with fewer workers:"
            " CPT_WORKERS=1."
        ) from problem
    finally:  # after an error or an early stop; unfinished work is never used
        if (num_workers, workers) not in (SHARED.idle or ()):
            workers.shutdown(kill_workers=True)


class Shared(threading.local):  # a worker ends with the thread that started it
    idle: "list[tuple[int, ProcessPoolExecutor]] | None" = None  # None outside of `shared_workers`


SHARED = Shared()


@contextmanager
def shared_workers() -> Iterator[None]:
    """Let successive calls of `map_in_order` use the same workers: new ones take a second to start."""
    before = SHARED.idle
    SHARED.idle = []
    try:
        yield
    finally:
        for _, workers in SHARED.idle:
            workers.shutdown()
        SHARED.idle = before


def take_workers(num_workers: int, imports: Sequence[str]) -> "ProcessPoolExecutor":
    from loky.process_executor import ProcessPoolExecutor

    idle = SHARED.idle or []
    for number, workers in idle:
        if number >= num_workers:
            idle.remove((number, workers))
            return workers
    if NO_LEAKS not in sys.warnoptions:
        sys.warnoptions.append(NO_LEAKS)
    path = os.pathsep.join(filter(None, sys.path))
    variables = {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": path}
    return ProcessPoolExecutor(
        num_workers, initializer=begin, initargs=(list(imports),), env=variables
    )


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes that are started inherit the mask: on Ctrl-C, this process ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(imports: Sequence[str]) -> None:
    die_with_parent()
    atexit.register(exit_now, 0)  # Python's own shutdown takes half a second
    os.dup2(2, 1)  # keep prints of user code out of a command's output
    for module in imports:
        with suppress(ImportError):
            import_module(module)


def call(function: bytes, argument: Any) -> Any:
    try:
        return unpickled(function)(argument)
    except Exception as problem:
        try:
            pickle.loads(pickle.dumps(problem))
        except Exception:  # its class needs more than a message, which would break the pool
            raise RuntimeError(f"{type(problem).__name__}: {problem}") from None
        raise


@lru_cache(maxsize=1)  # the function may contain a tokenizer
def unpickled(function: bytes) -> Callable[[Any], Any]:
    return pickle.loads(function)  # type: ignore[no-any-return]


def workers_for(num_bytes: int, num_jobs: int) -> int:
    """The number of processes for jobs that read files of this size in bytes."""
    return num_workers() if num_bytes >= POOL_BYTES and num_jobs > 1 else 0


def num_workers() -> int:
    """CPT_WORKERS, or the number of cores available to this process."""
    variable = os.environ.get("CPT_WORKERS", "")
    if not variable:
        return count_cpu_cores()
    if not variable.isdecimal():
        raise ResourceError(
            f"CPT_WORKERS: expected a whole number of worker processes, 0 for none, got `{variable}`."
        )
    return int(variable)
