"""Run a function on untrusted input in a process of its own, with limits on time and memory; the process may crash."""

import logging
import multiprocessing
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from cpt.data.documents.kinds import NotConverted

Argument = TypeVar("Argument")
Result = TypeVar("Result")
FORK = multiprocessing.get_context("fork")


def run_isolated(
    function: Callable[[Argument], Result], argument: Argument, seconds: float, memory_bytes: int
) -> Result:
    """What the function returns. Call it in a process without threads: it forks, so that imported libraries need no
    second import.

    Raises:
        NotConverted: by the function itself; or it took too long, too much memory, crashed, or raised anything else.
    """
    receiving, sending = FORK.Pipe(duplex=False)
    child = FORK.Process(target=answer, args=(function, argument, sending, seconds, memory_bytes))
    child.start()
    sending.close()
    try:
        is_result, given = receiving.recv()
    except EOFError:
        is_result, given = False, None
    child.join()
    if given is None and child.exitcode == -signal.SIGALRM:
        raise NotConverted("took too long", f"more than {seconds:g} seconds")
    if given is None:
        code = child.exitcode or 0
        raise NotConverted(
            "the converter crashed", f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        )
    if not is_result:
        raise NotConverted(*given)
    return given


def answer(
    function: Callable[[Argument], Any], argument: Argument, sending: Connection, seconds: float, memory_bytes: int
) -> None:
    """In the child: the kernel ends it after its time, whatever code it is in, and refuses it more memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if sys.platform == "linux":  # elsewhere the limit has no effect
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()
    try:
        sending.send((True, function(argument)))
    except NotConverted as problem:
        sending.send((False, (problem.reason, problem.detail)))
    except MemoryError:
        sending.send((False, ("too much memory", f"more than {memory_bytes / 2**30:.1f} GiB")))
    except Exception as problem:  # libraries raise anything at what they were not made for; the file is listed with it
        sending.send((False, ("the converter failed", " ".join(f"{type(problem).__name__}: {problem}".split())[:500])))
