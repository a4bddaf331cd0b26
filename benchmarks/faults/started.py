"""A command that was started: wait for its end, or end it with all that it started."""

import os
import signal
import subprocess
from contextlib import suppress

import psutil

Started = subprocess.Popen[bytes]


def wait(process: Started, seconds: float) -> int:
    """The exit code; 124 where it had to be ended."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        kill_all(process)


def kill_all(process: Started) -> None:
    """SIGKILL to a run's processes, also to those in sessions of torchrun's making."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    for child in family:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
