"""Do one function for many arguments in worker processes, and give the results in order.

Not concurrent.futures: its spawned workers import the user's `__main__` anew (for `cpt/train.py` that is torch and DeepSpeed, and a script
without a main guard starts itself again), and they outlive a parent that was killed. Ours import what they need, and end with the parent.
"""

import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from cpt.errors import ResourceError

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def map_in_order(
    prepare: Callable[[], Callable[[Argument], Result]], arguments: Sequence[Argument], num_workers: int, imports: Sequence[str] = ()
) -> Iterator[Result]:
    """The results in the order of the arguments, each as soon as it and all before it are there.

    Args:
        prepare: gives the function, importable or a picklable object with __call__. It is called while the workers start.
        num_workers: processes; with 0 everything is done here.
        imports: modules that workers import on their start, those that are installed.

    Raises:
        ResourceError: a worker died, most likely for want of memory.
        Exception: what the function raised, with the worker's traceback as a note. Where several arguments fail, the first one's, as if
            they had been taken one after the other.
    """
    if num_workers == 0 or not arguments:
        yield from map(prepare(), arguments)
        return
    futures: list[Future[Result]] = [Future() for _ in arguments]
    tasks: SimpleQueue[int] = SimpleQueue()
    for number in range(len(arguments)):
        tasks.put(number)
    workers = [Worker(arguments, futures, tasks, imports) for _ in range(min(num_workers, len(arguments)))]
    try:
        function = pickle.dumps(prepare())
        for worker in workers:
            worker.start(function)
        for future in futures:
            yield future.result()
    finally:  # also where the caller stops early
        for worker in workers:
            worker.stop()


class Worker(Generic[Argument, Result]):
    """A process, and the thread that hands it one argument after the other."""

    def __init__(
        self,
        arguments: Sequence[Argument],
        futures: Sequence["Future[Result]"],
        tasks: "SimpleQueue[int]",
        imports: Sequence[str],
    ) -> None:
        self._arguments, self._futures, self._tasks = arguments, futures, tasks
        self._stopping = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from cpt.data.parallel import work; work()", *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "CPT_WORKER": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._thread: threading.Thread | None = None

    def start(self, function: bytes) -> None:
        """Begin to hand out arguments for a pickled function."""
        self._thread = threading.Thread(target=self._serve, args=(function,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the process, whatever it is doing: what it leaves half done is not taken for complete."""
        self._stopping = True
        self._process.kill()
        if self._thread is not None:
            self._thread.join()
        self._process.wait()

    def _serve(self, function: bytes) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        number = None
        try:
            self._process.stdin.write(function)
            while True:
                number = self._tasks.get_nowait()
                pickle.dump(self._arguments[number], self._process.stdin)
                self._process.stdin.flush()
                failed, answer = pickle.load(self._process.stdout)
                if failed:
                    self._leave_the_rest()
                    self._futures[number].set_exception(answer)
                else:
                    self._futures[number].set_result(answer)
        except Empty:
            with suppress(OSError):
                self._process.stdin.close()  # it ends
        except (OSError, EOFError, pickle.UnpicklingError) as problem:
            with suppress(Empty):
                number = self._tasks.get_nowait() if number is None else number
            self._leave_the_rest()
            if number is not None and not self._stopping:
                self._futures[number].set_exception(died(self._process.wait(), problem))

    def _leave_the_rest(self) -> None:
        """After a failure nothing new is begun; what comes before it in order has been begun by others and will be finished."""
        with suppress(Empty):
            while True:
                self._tasks.get_nowait()


def died(code: int, problem: Exception) -> ResourceError:
    """What to say of a worker that is gone."""
    how = f"was killed by signal {-code}; most likely memory ran out" if code < 0 else f"ended with code {code}; what it said stands above"
    return ResourceError(
        f"a worker process that read and tokenised documents {how} ({type(problem).__name__}). "
        "What was finished is kept: start again, with fewer workers: CPT_WORKERS=1."
    )


def num_workers() -> int:
    """CPT_WORKERS, or as many as there are cores for this process."""
    asked = os.environ.get("CPT_WORKERS", "")
    if not asked:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not asked.isdecimal():
        raise ResourceError(f"CPT_WORKERS is `{asked}`, expected a whole number: how many processes tokenise; 0 for none besides this one.")
    return int(asked)


def work() -> None:
    """What a worker process does until nothing more comes."""
    # What a user's filter prints must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):  # the parent is gone, or this is its wish
        for module in sys.argv[1:]:
            with suppress(ImportError):
                import_module(module)
        function = pickle.load(sys.stdin.buffer)
        while True:
            answers.write(answer_of(function, pickle.load(sys.stdin.buffer)))
            answers.flush()


def answer_of(function: Callable[[Any], Any], argument: Any) -> bytes:
    """(False, result) or (True, exception), pickled."""
    try:
        return pickle.dumps((False, function(argument)))
    except Exception as problem:  # it is raised where it is waited for
        trace = traceback.format_exc()
        try:
            raw = pickle.dumps(problem)
            pickle.loads(raw)
        except (pickle.PicklingError, TypeError, AttributeError):  # made by a class that cannot be made anew
            problem = RuntimeError(f"{type(problem).__name__}: {problem}")
        problem.add_note(f"In a worker process:\n{trace}")
        return pickle.dumps((True, problem))
