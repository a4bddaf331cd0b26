"""One trial as a run in processes of its own: started, watched while it trains, and ended early where it is not worth
its time."""

import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from cpt.errors import Interrupted, LaunchError, RestartNeeded
from cpt.launchers.attempts import SUPERVISED, kill_family, send
from cpt.launchers.watch import Watch
from cpt.runs.events import record_event
from cpt.runs.record import Run, hold
from cpt.runs.signs import forget_signs, pids_here
from cpt.search.figures import Tail

MOST_RESTARTS = 12  # of a run that learns by running out of memory: each halves its micro-batch
SECONDS_OF_GRACE = 120.0  # for a save, after which a trial that was told to end is killed
DIVERGED = "TrainingError"
LAST_LINES = 5


@dataclass(frozen=True)
class Ending:
    """How a trial ended."""

    state: Literal["complete", "pruned", "failed", "stopped"]
    """stopped: by a signal, from the search or from elsewhere; the trial is to go on later."""
    value: float | None = None
    reason: str = ""
    is_of_values: bool = False
    """It failed because of the values that it tried, which is a result: others may do better."""


class Trial(Protocol):
    """A trial under way, as the search sees it."""

    def look(self) -> tuple[list[tuple[int, float]], Ending | None]:
        """The (tokens, value) that came since the last look, and how it ended, once it has."""
        ...

    def prune(self, reason: str) -> None:
        """It is not worth its time."""
        ...

    def stop(self, number: int) -> None:
        """Pass a signal on; the trial saves and ends."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


@dataclass
class TrialRun:
    """The run of a trial.

    Where an earlier search was killed and its trial trains on without it, that process is watched to its end and no
    other is started.

    Args:
        run: its folder.
        words: the command.
        metric: the figure.
        log: takes what the processes print.
        environment: on top of this process's own.
    """

    run: Run
    words: Sequence[str]
    metric: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    pruned: str = ""
    """Why it is not worth its time."""
    stood_still: str = ""
    told: int = 0
    told_at: float = 0.0
    child: subprocess.Popen[bytes] | None = None
    """None while the run is another search's child."""
    starts: int = 0
    known: str | None = None
    """The status's time before the last start."""

    def __post_init__(self) -> None:
        self.tail = Tail(self.run.folder, self.metric)
        self.is_adopted = is_held(self.run.folder)
        if self.is_adopted and self.pruned:
            self.stop(signal.SIGTERM)
        elif not (self.is_adopted or self.run.is_finished or self.pruned):
            self.start()

    @property
    def mark(self) -> str:
        """What all its processes have in their environment."""
        return f"{os.getpid()}-{self.run.folder.name}"

    def start(self) -> None:
        """Start the processes, or start them again."""
        self.run.folder.mkdir(parents=True, exist_ok=True)
        forget_signs(self.run.folder)
        self.known = self.run.status().get("updated")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.environment, SUPERVISED: self.mark}
        with self.log.open("ab") as output:
            try:
                self.child = subprocess.Popen(
                    self.words, env=environment, stdout=output, stderr=output, start_new_session=True
                )
            except OSError as problem:
                raise LaunchError(f"{self.words[0]} cannot be started: {problem.strerror}") from problem
        self.watch, self.starts = Watch(self.run.folder), self.starts + 1

    def look(self) -> tuple[list[tuple[int, float]], Ending | None]:
        """See `Trial`."""
        is_over = not self.is_alive()
        values = self.tail.new_values()
        if not is_over:
            self.end_where_it_does_not()
            return values, None
        return values, self.ending()

    def is_alive(self) -> bool:
        """Whether a process of it is there."""
        if self.is_adopted:
            self.is_adopted = is_held(self.run.folder)
        return self.is_adopted or self.child is not None and self.child.poll() is None

    def end_where_it_does_not(self) -> None:
        """Kill what stands still, and what was told to end and did not."""
        now = time.monotonic()
        if self.told and now - self.told_at > SECONDS_OF_GRACE:
            self.kill()
        elif self.child is not None and not self.told and (sign := self.watch.hung(now)) is not None:
            self.stood_still = f"process {sign.rank} made no progress after step {sign.step} ({sign.phase})"
            record_event(self.run.folder, "hang", f"{self.stood_still}; it is ended.")
            self.kill()

    def ending(self) -> Ending | None:
        """How the last process ended; None where the run is started again, or another process turns out to train
        it."""
        status = self.run.status()
        own = status if status.get("updated") != self.known else {}
        if self.run.is_finished:
            return self.finished()
        if self.pruned:
            self.run.write_status("pruned", message=self.pruned, exit_code=0)
            return Ending("pruned", reason=self.pruned)
        if self.told and not self.stood_still:
            return Ending("stopped", reason=str(own.get("message", "")))
        if not self.starts or own.get("error") == RestartNeeded.__name__ and self.starts < MOST_RESTARTS:
            self.start()
            return None
        if is_held(
            self.run.folder
        ):  # by a process of an earlier search, which came to it between our look and our start
            self.is_adopted = True
            return None
        if own.get("exit_code") == Interrupted.exit_code:
            return Ending("stopped", reason=str(own.get("message", "")))
        if own.get("state") == "failed":
            return Ending(
                "failed", reason=f"{own.get('error')}: {own.get('message')}", is_of_values=own.get("error") == DIVERGED
            )
        reason = self.stood_still or self.last_words()
        if (
            LaunchError.__name__ in reason and self.starts < MOST_RESTARTS
        ):  # refused by such a process, which has ended since
            self.start()
            return None
        self.run.write_status("failed", error="Killed", message=reason, exit_code=1)  # it could not say so itself
        return Ending("failed", reason=reason)

    def finished(self) -> Ending:
        """With the figure that was logged last."""
        if self.tail.last is None:
            return Ending("failed", reason=f"no `{self.metric}` in {self.run.folder}/metrics.jsonl")
        if not math.isfinite(self.tail.last):
            return Ending("failed", reason=f"`{self.metric}` is {self.tail.last}: the run diverged", is_of_values=True)
        return Ending("complete", self.tail.last)

    def last_words(self) -> str:
        """Of a process that had no time to say how it ended."""
        code = self.child.returncode if self.child is not None else None
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        lines: Sequence[str] = []
        if self.log.exists():
            with self.log.open(errors="replace") as file:
                lines = deque((line.strip() for line in file if line.strip()), maxlen=LAST_LINES)
        return f"ended with {how}" + (f": {lines[-1]}" if lines else "")

    def prune(self, reason: str) -> None:
        """See `Trial`."""
        self.pruned = reason
        record_event(self.run.folder, "pruned", reason)
        self.stop(signal.SIGTERM)

    def stop(self, number: int) -> None:
        """See `Trial`; the run's own processes are told, for launchers pass signals on in ways of their own."""
        self.told, self.told_at = number, time.monotonic()
        for pid in pids_here(self.run.folder) or ([self.child.pid] if self.child is not None else []):
            send(pid, number)

    def kill(self) -> None:
        """See `Trial`."""
        if self.child is not None:
            kill_family(self.child.pid, self.mark)
            self.child.wait()
        elif self.is_adopted:
            for pid in pids_here(self.run.folder):
                send(pid, signal.SIGKILL)


def is_held(folder: Path) -> bool:
    """Whether a process trains this run; asked only where none of ours may be about to begin."""
    if not folder.is_dir():
        return False
    try:
        lock = hold(folder)
    except LaunchError:
        return True
    if lock is not None:
        lock.close()
    return False
