"""Starts that take a second: a command is run by a fork of one process that has imported all that it imports,
torchrun's processes too.

What is started does from then on what it does where Python executes it: it reads its recipe, its checkpoints and its
environment, has its own memory, and is killed for good. Only the seconds of imports are saved, which are most of a
start of a tiny model. One start in ten is executed nevertheless.
"""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver, get_context, resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

IMPORTED = (
    *(
        "cpt.train",
        "benchmarks.faults.__main__",
        "benchmarks.faults.stage",
        "benchmarks.faults.plain",
        "torch.distributed.run",
    ),
    *("transformers.models.llama.modeling_llama", "deepspeed", "deepspeed.runtime.engine", "datasets", "accelerate"),
)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD)
EXECUTED = 0.1
ONE_AT_A_TIME = threading.Lock()  # Python's own list of children is not made for threads


class Forked:
    """A started command, with what the suite asks of a Popen."""

    def __init__(self, process: Any) -> None:
        self.process, self.pid, self.returncode = process, process.pid, None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with ONE_AT_A_TIME:
            self.returncode = self.process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if give_up is not None and time.monotonic() > give_up:
                raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        """To this process alone."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def begin_forking(environment: Mapping[str, str]) -> None:
    """Start the one process; what it finds in its environment when it imports, and its preloaded libraries, are those
    of all forks."""
    before = dict(os.environ)
    os.environ.update(environment)
    try:
        get_context("forkserver").set_forkserver_preload(list(IMPORTED))
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


def fork(words: Sequence[str], environment: Mapping[str, str], output: Path, folder: Path) -> Forked:
    """Run a command of Python's, in a process group of its own.

    Args:
        output: what it says is added there.
    """
    process = get_context("forkserver").Process(
        target=become, args=(list(words), dict(environment), str(output), str(folder))
    )
    with ONE_AT_A_TIME:
        process.start()
    return Forked(process)


def become(words: list[str], environment: dict[str, str], output: str, folder: str) -> None:
    """The body of a fork."""
    os.setsid()
    with open(output, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    SubprocessHandler._popen = fork_instead  # type: ignore[assignment]
    run(words, environment)


def fork_instead(handler: SubprocessHandler, words: Sequence[str], environment: Mapping[str, str]) -> "ForkedAgain":
    """How torchrun starts its processes."""
    return ForkedAgain(words, env=environment, start_new_session=True)


class ForkedAgain(subprocess.Popen):
    """A process of torchrun's, as Popen knows it; forked where Popen executes."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        """Instead of another program, this one goes on in the child."""
        environment = others[5]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            os.setsid()
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # as where Python begins
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.closerange(3, 4096)
            vars(resource_tracker._resource_tracker).update(
                _fd=None, _pid=None
            )  # the number of its file will be another's
            run(list(args), environment)


def run(words: list[str], environment: Mapping[str, str]) -> None:
    """Do what Python does with these words, and end."""
    os.environ.clear()
    os.environ.update(environment)
    rest = [word for word in words[1:] if word != "-u"]
    code: Any = 0
    try:
        if rest[0] == "-m":
            sys.argv = rest[1:]
            runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = rest
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0 if code is None else 1)
