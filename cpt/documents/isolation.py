"""Run a function on what strangers made: in a process of its own that may crash, and must end in time and within its memory."""

import logging
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from cpt.documents.converted import NotConverted

Argument = TypeVar("Argument")
Result = TypeVar("Result")


def run_isolated(function: Callable[[Argument], Result], argument: Argument, seconds: float, memory_bytes: int) -> Result:
    """What the function returns, or raises as NotConverted.

    Call it in a process without threads: it forks, so that libraries which are imported already need not be imported again.

    Raises:
        NotConverted: by the function itself; or it took too long, too much memory, crashed, or failed at something it did not foresee.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receiving)
        answer(function, argument, sending, seconds, memory_bytes)
    os.close(sending)
    try:
        with os.fdopen(receiving, "rb") as stream:
            raw = stream.read()
    finally:
        _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0 or not raw:
        raise why_it_ended(os.waitstatus_to_exitcode(status), seconds)
    is_result, given = pickle.loads(raw)
    if is_result:
        return given
    raise NotConverted(*given)


def answer(function: Callable[[Argument], Any], argument: Argument, sending: int, seconds: float, memory_bytes: int) -> None:
    """What the child does; it never returns."""
    code = 1
    try:
        limit(seconds, memory_bytes)
        try:
            raw = pickle.dumps((True, function(argument)))
        except NotConverted as problem:
            raw = pickle.dumps((False, (problem.reason, problem.detail)))
        except MemoryError:
            raw = pickle.dumps((False, ("too much memory", f"more than {memory_bytes / 2**30:.1f} GiB")))
        except Exception as problem:  # libraries raise anything at what they were not made for; the file is listed with it
            said = " ".join(f"{type(problem).__name__}: {problem}".split())[:500]
            raw = pickle.dumps((False, ("the converter failed", said)))
        with os.fdopen(sending, "wb") as stream:
            stream.write(raw)
        code = 0
    finally:
        os._exit(code)


def limit(seconds: float, memory_bytes: int) -> None:
    """Let the kernel end this process when its time is over, whatever code it is in, and refuse it more memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if sys.platform == "linux":  # elsewhere the limit is not kept
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()  # what a library has to say is in what it raises


def why_it_ended(code: int, seconds: float) -> NotConverted:
    """What to say of a process that gave no answer."""
    if code == -signal.SIGALRM:
        return NotConverted("took too long", f"more than {seconds:g} seconds")
    how = f"signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exit code {code}"
    return NotConverted("the converter crashed", how)
