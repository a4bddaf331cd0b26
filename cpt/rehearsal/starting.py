"""Start a part of a rehearsal as the run will be started, watch its memory, and say how it ended."""

import json
import os
import re
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cpt.errors import LaunchError, RestartNeeded
from cpt.launchers.attempts import SUPERVISED, command_of_attempt, kill_family
from cpt.launchers.processes import environment_alone
from cpt.launchers.watch import Watch
from cpt.rehearsal.watching import MOMENTS, Failure, Memory
from cpt.runs.events import read_events
from cpt.runs.signs import forget_signs

PROGRAM = Path(__file__).with_name("part.py")
SECONDS_BETWEEN_LOOKS = 0.2
MOST_RESTARTS = 12  # each halves the micro-batch
KILLED = re.compile(
    r"Signal 9 \(SIGKILL\)|return code = -9|SIGKILL: 9"
)  # as torchrun, deepspeed and accelerate say it
KILLED_CODES = (-9, 137)
LAST_LINES = 200


@dataclass(frozen=True)
class Launch:
    """How the run will be started on this machine."""

    processes: int
    launcher: str | None


@dataclass(frozen=True)
class Ended:
    """A part at its end, and what it told of itself."""

    code: int
    failure: Failure | None
    """What the first of its processes to fail said; None where all went well, or where none could speak."""
    was_killed: bool
    stood_still: str | None
    """Which process, where one made no progress any more."""
    memory: Memory
    """Of the host over all processes; of a GPU the most that any took."""
    moments: list[dict[str, Any]]
    reports: Path
    log: Path

    @property
    def is_done(self) -> bool:
        """True where it came to its own end."""
        return self.code == 0 and self.failure is None

    def report(self, name: str) -> Any:
        """What it wrote under this name, None where it did not come to that."""
        path = self.reports / name
        return json.loads(path.read_text()) if path.exists() else None

    def number_of(self, what: str) -> int:
        """How often something happened."""
        return sum(moment["what"] == what for moment in self.moments)

    def seconds_before(self, what: str, step: int) -> float | None:
        """How long something took: since whatever was noted before it."""
        for before, moment in zip(self.moments, self.moments[1:], strict=False):
            if moment["what"] == what and moment["step"] == step:
                return float(moment["time"] - before["time"])
        return None


def run_part(part: str, recipe: Path, run_folder: Path, scratch: Path, launch: Launch) -> Ended:
    """Run the part to its end; where it learned that it needs smaller micro-batches, again.

    Args:
        recipe: as it is rehearsed.
        run_folder: of the rehearsed run.
        scratch: of the rehearsal; the part's log and reports go there.
    """
    log = scratch / f"{part}.log"
    for number in range(MOST_RESTARTS):
        reports = scratch / f"{part}-{number}"
        reports.mkdir()
        before = len(read_events(run_folder))
        ended = start(part, recipe, run_folder, reports, log, launch)
        learned = [
            event
            for event in read_events(run_folder)[before:]
            if event["kind"] == "out_of_memory" and event.get("restart")
        ]
        asked = ended.failure is not None and ended.failure.error == RestartNeeded.__name__
        judged = (
            ended.failure is not None and ended.failure.place == "evaluation"
        )  # whose batch a smaller micro-batch does not change
        if ended.is_done or judged or not (learned or asked):
            break
    return ended


def start(part: str, recipe: Path, run_folder: Path, reports: Path, log: Path, launch: Launch) -> Ended:
    """One start."""
    words = command_of_attempt([part, str(recipe), str(reports)], launch.processes, launch.launcher, PROGRAM)
    # Python would look for modules first in the program's folder, whose files could hide others.
    marks = {SUPERVISED: str(os.getpid()), "PYTHONSAFEPATH": "1", "PYTHONPATH": environment_alone()["PYTHONPATH"]}
    forget_signs(run_folder)
    with log.open("ab") as output:
        try:
            child = subprocess.Popen(
                words, env={**os.environ, **marks}, stdout=output, stderr=output, start_new_session=True
            )
        except OSError as problem:
            raise LaunchError(f"--launcher: {words[0]} cannot be started: {problem.strerror}") from problem
        watch, stood_still, host = Watch(run_folder), None, 0
        try:
            while child.poll() is None:
                time.sleep(SECONDS_BETWEEN_LOOKS)
                host = max(host, resident_bytes(child.pid))
                if (sign := watch.hung(time.monotonic())) is not None:
                    stood_still = f"process {sign.rank} made no progress after step {sign.step} ({sign.phase})"
                    break
        finally:
            kill_family(child.pid)
            child.wait()
    return ended_as(child.returncode, stood_still, host, reports, log)


def resident_bytes(pid: int) -> int:
    """Of a process and all below it."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        for process in [top, *top.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                total += process.memory_info().rss
    return total


def ended_as(code: int, stood_still: str | None, host: int, reports: Path, log: Path) -> Ended:
    """What a start left behind."""
    failures = [Failure(**content) for content in contents(reports, "failed-*.json")]
    said = "".join(last_lines(log))
    was_killed = stood_still is None and code != 0 and (code in KILLED_CODES or KILLED.search(said) is not None)
    measured = [Memory(**content) for content in contents(reports, "memory-*.json")]
    most = max(measured, key=lambda one: one.reserved, default=Memory(0))
    memory = Memory(max(host, sum(one.host for one in measured)), most.allocated, most.reserved, most.of_gpu)
    path = reports / MOMENTS
    moments = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    failure = min(failures, key=lambda one: one.time, default=None)
    return Ended(code, failure, was_killed, stood_still, memory, moments, reports, log)


def contents(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Of JSON files."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def last_lines(log: Path) -> Sequence[str]:
    """Of what a part printed."""
    with log.open(errors="replace") as file:
        return deque(file, maxlen=LAST_LINES)
