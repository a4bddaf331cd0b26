"""Call one function for many arguments in worker processes, with the results in order.

By loky: spawned workers of the standard library import the user's `__main__` again, torch and DeepSpeed for
`cpt/train.py`, and a script without a main guard would start itself again."""

import os
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import Any, TypeVar

from cpt.errors import ResourceError
from cpt.hardware import count_cpu_cores
from cpt.process import die_with_parent

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def map_in_order(
    prepare: Callable[[], Callable[[Argument], Result]],
    arguments: Iterable[Argument],
    num_workers: int,
    imports: Sequence[str] = (),
) -> Iterator[Result]:
    """The results in the order of the arguments; an error is the first argument's that fails.

    Args:
        prepare: gives the function, which can be pickled. It is called while the workers start.
        arguments: taken one by one, a few ahead of the workers.
        num_workers: processes; with 0 everything is done in this one.
        imports: modules that workers import when they start, if they are installed.

    Raises:
        ResourceError: a worker died, most likely out of memory.
    """
    arguments = iter(arguments)
    if (first := next(arguments, None)) is None:
        return
    arguments = chain([first], arguments)
    if num_workers == 0:
        yield from map(prepare(), arguments)
        return
    from loky.process_executor import BrokenProcessPool, ProcessPoolExecutor

    path = os.pathsep.join(filter(None, sys.path))
    variables = {"TOKENIZERS_PARALLELISM": "false", "CPT_WORKER": "1", "PYTHONPATH": path}
    workers = ProcessPoolExecutor(num_workers, initializer=begin, initargs=(list(imports),), env=variables)
    waiting: deque[Future[Result]] = deque()
    try:
        workers.submit(int)  # starts them
        function = pickle.dumps(prepare())
        for argument in arguments:
            waiting.append(workers.submit(call, function, argument))
            if len(waiting) > num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
        workers.shutdown()
    except BrokenProcessPool as problem:
        raise ResourceError(
            "a worker process that read and tokenised documents died, most likely out of memory "
            f"({' '.join(str(problem).split())[:300]}). Finished work is stored. Start again with fewer workers:"
            " CPT_WORKERS=1."
        ) from problem
    finally:  # after an error, or where the caller stops early: what they leave half done is never used
        workers.shutdown(kill_workers=True)


def begin(imports: Sequence[str]) -> None:
    die_with_parent()
    os.dup2(2, 1)  # what a user's filter prints must not mix with a command's output
    for module in imports:
        with suppress(ImportError):
            import_module(module)


def call(function: bytes, argument: Any) -> Any:
    try:
        return unpickled(function)(argument)
    except Exception as problem:
        try:
            pickle.loads(pickle.dumps(problem))
        except Exception:  # its class cannot be made from its message alone, which would break the pool
            raise RuntimeError(f"{type(problem).__name__}: {problem}") from None
        raise


@lru_cache(maxsize=1)  # the function may hold a tokenizer
def unpickled(function: bytes) -> Callable[[Any], Any]:
    return pickle.loads(function)  # type: ignore[no-any-return]


def num_workers() -> int:
    """CPT_WORKERS, or the number of cores that this process may use."""
    if not (asked := os.environ.get("CPT_WORKERS", "")):
        return count_cpu_cores()
    if not asked.isdecimal():
        raise ResourceError(f"CPT_WORKERS: expected a whole number of worker processes, 0 for none, got `{asked}`.")
    return int(asked)
