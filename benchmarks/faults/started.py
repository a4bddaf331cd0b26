"""A command that was started: wait for its end, or end it with all that it started."""

import os
import signal
import subprocess
from contextlib import suppress

import psutil

from benchmarks.faults.forked import Forked

Started = subprocess.Popen | Forked


def wait(process: Started, seconds: float) -> int:
    """The exit code; 124 where it had to be ended."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        kill_all(process)


def family_of(process: Started) -> list[psutil.Process]:
    """What it started, and what that started."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process.pid).children(recursive=True)
    return []


def kill_all(process: Started, family: list[psutil.Process] | None = None) -> None:
    """SIGKILL to a run's processes, those in sessions of torchrun's making too.

    Args:
        family: as it is known already; looking for it takes a tenth of a second.
    """
    for child in family_of(process) if family is None else family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
