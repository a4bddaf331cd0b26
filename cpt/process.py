"""Start, watch, signal and end a process with all of its children."""

import ctypes
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import psutil

from cpt.errors import LaunchError
from cpt.interrupts import SUPERVISED, replaceable_handlers

MOST_WITHOUT_PROGRESS = 3
"""Restarts with the same reason; a step, a smaller micro-batch or another roll-back changes the reason."""
SECONDS_BETWEEN_LOOKS = 0.2
MOST_LOOKS = 10
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
LIBC = ctypes.CDLL(None)


@dataclass
class ReceivedSignals:
    """Signals that arrived while children run: recorded here, and forwarded by the loop that watches the children."""

    first: int = 0
    """The first signal, 0 if none arrived."""
    interrupts: int = 0
    """Number of SIGINTs."""
    wake: threading.Event = field(default_factory=threading.Event)
    """Set by each signal, so that a waiting loop reacts at once."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Handle the signals; outside the main thread, where Python cannot, do not change them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = replaceable_handlers()
        for number in before:
            signal.signal(number, self.at_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def at_signal(self, number: int, _: object) -> None:
        self.first = self.first or number
        if number == signal.SIGINT:
            self.interrupts += 1
        self.wake.set()

    def wait(self, seconds: float = SECONDS_BETWEEN_LOOKS) -> None:
        self.wake.wait(seconds)
        self.wake.clear()


class Child(subprocess.Popen[bytes]):
    """A command in a new session, and its descendants.

    torchrun starts its workers in new sessions, which outlive a killed torchrun. They are found by CPT_SUPERVISED in
    their environment. Start the child from a thread that lives as long as the child: on Linux the child gets SIGTERM
    when that thread ends, so that no process outlives a killed parent.

    Args:
        environment: variables added to those of `inherits`, by default this process's.
        output: for stdout and stderr; inherited by default.
        ignores: a signal that the command ignores unless it handles it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        inherits: Mapping[str, str] = os.environ,
        folder: Path | None = None,
        output: IO[bytes] | IO[str] | None = None,
        ignores: signal.Signals | None = None,
    ) -> None:
        self.mark = f"{os.getpid()}-{uuid4().hex}"
        variables = {**inherits, **(environment or {}), SUPERVISED: self.mark}
        options: dict[str, Any] = {
            "start_new_session": True,
            "preexec_fn": partial(die_with_parent, ignores),
        }
        received = ReceivedSignals()
        try:
            # Python ignores what a signal's handler raises during a fork, so handlers run after it.
            with received.noted():
                super().__init__(
                    command, env=variables, cwd=folder, stdout=output, stderr=output, **options
                )
        except OSError as problem:
            raise LaunchError(f"{command[0]} cannot be started: {problem.strerror}.") from problem
        if received.first:
            try:
                signal.raise_signal(received.first)
            except BaseException:
                self.kill_family()
                raise

    def wait_for_end(
        self, look: Callable[[], bool] | None = None, forward: Callable[[int], None] | None = None
    ) -> tuple[int, int]:
        """Wait for the end while forwarding signals, then kill remaining descendants.

        Args:
            look: called several times per second; True kills the child.
            forward: called with a signal's number instead of sending it to the child. A second SIGINT kills.

        Returns:
            The return code (negative: the signal that ended it), and the first signal that was forwarded or 0.
        """
        received = ReceivedSignals()
        sent = 0
        try:
            with received.noted():
                while self.poll() is None:
                    received.wait()
                    if received.interrupts > 1 or (look is not None and look()):
                        break
                    if received.first == sent:
                        continue
                    sent = received.first
                    if forward:
                        forward(sent)
                    else:
                        send(self.pid, sent)
        finally:
            self.kill_family()
        return self.wait(), sent

    def kill_family(self) -> None:
        """Kill the child, if it runs, and everything it started."""
        if self.poll() is None:
            send(self.pid, signal.SIGKILL)
            self.wait()  # before psutil, which would consume its return code
        for _ in range(MOST_LOOKS):  # during exec, a process's environment is briefly unreadable
            family = marked_processes(self.mark)
            if not family:
                return
            for process in family:
                send(process.pid, signal.SIGKILL)
            psutil.wait_procs(family, timeout=30)


def marked_processes(mark: str) -> list[psutil.Process]:
    """Running processes with this CPT_SUPERVISED in their environment."""
    marked = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_marked = process.environ().get(SUPERVISED) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                marked.append(process)
    return marked


def send(pid: int, number: int) -> None:
    """Send a signal, if the process still exists and is ours."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def die_with_parent(ignores: signal.Signals | None = None) -> None:
    """Called in a new process before its program starts: get SIGTERM when the parent dies, even by SIGKILL."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if ignores is not None:
        signal.signal(ignores, signal.SIG_IGN)


def is_without_progress(reasons: Sequence[str]) -> bool:
    """Whether the last restart would be one too many for the same reason; `reasons` of all restarts, in order."""
    recent = reasons[-MOST_WITHOUT_PROGRESS - 1 :]
    return recent.count(reasons[-1]) > MOST_WITHOUT_PROGRESS


def free_port() -> int:
    """Return a currently unused port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
