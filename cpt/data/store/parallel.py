"""Do one function for many arguments in worker processes, and give the results in order.

Not concurrent.futures: its spawned workers import the user's `__main__` anew (for `cpt/train.py` that is torch and
DeepSpeed, and a script without a main guard starts itself again), and they outlive a parent that was killed. Ours
import what they need, and end with the parent."""

import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import import_module
from itertools import chain
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from cpt.errors import ResourceError
from cpt.output import make_output_safe

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def map_in_order(
    prepare: Callable[[], Callable[[Argument], Result]],
    arguments: Iterable[Argument],
    num_workers: int,
    imports: Sequence[str] = (),
) -> Iterator[Result]:
    """The results in the order of the arguments, each as soon as it and all before it are there.

    Args:
        prepare: gives the function, importable or a picklable object with __call__. It is called while the workers
            start.
        arguments: asked for the next one whenever a worker is free, from one of our threads.
        num_workers: processes; with 0 everything is done here.
        imports: modules that workers import on their start, those that are installed.

    Raises:
        ResourceError: a worker died, most likely for want of memory.
        Exception: what the function raised, with the worker's traceback as a note. Where several arguments fail, the
        first one's, as if
            they had been taken one after the other.
    """
    remaining = iter(arguments)
    for first in remaining:
        arguments = chain([first], remaining)
        break
    else:
        return
    if num_workers == 0:
        yield from map(prepare(), arguments)
        return
    tasks: Tasks[Argument, Result] = Tasks(arguments)
    workers = [Worker(tasks, imports) for _ in range(num_workers)]
    try:
        function = pickle.dumps(prepare())
        for worker in workers:
            worker.start(function)
        while (future := tasks.futures.get()) is not None:
            yield future.result()
    finally:  # also where the caller stops early
        tasks.end()
        for worker in workers:
            worker.stop()


class Tasks(Generic[Argument, Result]):
    """Arguments that workers take one after the other, and the results that will come, in the same order."""

    def __init__(self, arguments: Iterable[Argument]) -> None:
        self.futures: SimpleQueue[Future[Result] | None] = SimpleQueue()  # None: no more
        self._arguments, self._lock, self._ended = iter(arguments), threading.Lock(), False

    def take(self) -> "tuple[Argument, Future[Result]] | None":
        """The next argument, and where its result goes; None where there is no more to do."""
        with self._lock:
            if self._ended:
                return None
            future: Future[Result] = Future()
            try:
                argument = next(self._arguments)
            except StopIteration:
                self.end()
                return None
            except Exception as problem:  # it is raised where results are waited for
                self.futures.put(future)
                future.set_exception(problem)
                self.end()
                return None
            self.futures.put(future)
            return argument, future

    def end(self) -> None:
        """Give out nothing more; what was taken is finished, and with it everything that comes before it in order."""
        self._ended = True
        self.futures.put(None)


class Worker(Generic[Argument, Result]):
    """A process, and the thread that hands it one argument after the other."""

    def __init__(self, tasks: Tasks[Argument, Result], imports: Sequence[str]) -> None:
        self._tasks = tasks
        self._stopping = False
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from cpt.data.store.parallel import work; work()", *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "TOKENIZERS_PARALLELISM": "false",
                "CPT_WORKER": "1",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
        )
        self._thread: threading.Thread | None = None

    def start(self, function: bytes) -> None:
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
        task = None
        try:
            self._process.stdin.write(function)
            while (task := self._tasks.take()) is not None:
                argument, future = task
                pickle.dump(argument, self._process.stdin)
                self._process.stdin.flush()
                failed, answer = pickle.load(self._process.stdout)
                if failed:
                    self._tasks.end()
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            with suppress(OSError):
                self._process.stdin.close()  # it ends
        except (OSError, EOFError, pickle.UnpicklingError) as problem:
            task = task or self._tasks.take()
            self._tasks.end()
            if task is not None and not self._stopping:
                task[1].set_exception(died(self._process.wait(), problem))


def died(code: int, problem: Exception) -> ResourceError:
    """What to say of a worker that is gone."""
    how = (
        f"was killed by signal {-code}; most likely memory ran out"
        if code < 0
        else f"ended with code {code}; what it said stands above"
    )
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
        raise ResourceError(
            f"CPT_WORKERS is `{asked}`, expected a whole number: how many processes tokenise; 0 for none besides this"
            " one."
        )
    return int(asked)


def work() -> None:
    """What a worker process does until nothing more comes."""
    # What a user's filter prints must not come between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere if sys.stderr is None else sys.stderr.fileno(), sys.stdout.fileno())
    make_output_safe(outlives_readers=True)
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
