"""Signals that ask a run to stop, to one of its processes, to their launcher or to all: the run must save where it stands and go on."""

import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from benchmarks.faults.comparing import steps_lost
from benchmarks.faults.runs import MOST_SECONDS, System, await_step, wait
from benchmarks.faults.trials import SYSTEMS, Outcome, Suite, resumed, told, tried_once

STEPS, EVERY = 16, 8
PAUSE: dict[str, Any] = {"kind": "pause", "seconds": 0.2}
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def send_signals(suite: Suite) -> list[dict[str, Any]]:
    """Each signal to each target, so many times, for both systems; the plain Trainer gets each a single time, it knows none of them."""
    found = []
    for stage in suite.stages:
        for number in NUMBERS:
            for name, send in TARGETS.items():
                for system in SYSTEMS:
                    times = suite.signals if system == "cpt" else min(1, suite.signals)
                    draw = random.Random(number)
                    outcomes = [tried_once(signalled, suite, system, stage, number, send, draw) for _ in range(times)]
                    found.append(told(f"{number.name} to {name}", suite.kind(stage).replace("plain", "DDP x 2"), system, outcomes))
    return found


def signalled(suite: Suite, system: System, stage: int, number: signal.Signals, send: "Send", draw: random.Random) -> Outcome:
    """Send it in the middle of a step, and start the same command again."""
    options: dict[str, Any] = {"steps": STEPS, "every": EVERY, "processes": 2}
    straight = suite.straight("signals", system, stage, **options)
    run, at = suite.run("signal", system, stage, **options), draw.randint(3, STEPS - 3)
    process = run.start([PAUSE])
    if not await_step(run, process, at):
        return Outcome(False, "ended before the signal")
    members = ranks(process)  # a launcher that dies of the signal leaves them to nobody
    send(process, number)
    code = wait_for_all(process, members)
    saved = max(run.checkpoints(), default=0)
    how = "saved the step it was in" if saved >= at else f"saved nothing, up to {EVERY} steps lost"
    if code == 0 or run.is_done():  # without a launcher, too
        return Outcome(False, "took no notice")
    outcome = resumed(run, straight)
    good = outcome.good and saved >= at and steps_lost(run) == 0
    return Outcome(good, f"{how}; then {outcome.what}")


def wait_for_all(process: subprocess.Popen, members: list[psutil.Process]) -> int:
    """The launcher's exit code, once the run's own processes are gone too: it may go before them."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(MOST_SECONDS)
    psutil.wait_procs(members, timeout=120)
    return wait(process, 1)


def ranks(process: subprocess.Popen) -> list[psutil.Process]:
    """The processes that train, without those that they started themselves."""
    found: dict[int, tuple[int, psutil.Process]] = {}
    with suppress(psutil.NoSuchProcess):
        leader = psutil.Process(process.pid)
        for one in (leader, *leader.children(recursive=True)):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if "LOCAL_RANK" in (environment := one.environ()) and one.ppid() not in found:
                    found[one.pid] = (int(environment["LOCAL_RANK"]), one)
        return [one for _, one in sorted(found.values(), key=lambda pair: pair[0])] or [leader]
    return []


def to_one_process(process: subprocess.Popen, number: signal.Signals) -> None:
    """The last rank."""
    ranks(process)[-1].send_signal(number)


def to_launcher(process: subprocess.Popen, number: signal.Signals) -> None:
    """What was started."""
    process.send_signal(number)


def to_group(process: subprocess.Popen, number: signal.Signals) -> None:
    """The launcher's process group: what a terminal reaches."""
    os.killpg(process.pid, number)


def to_all(process: subprocess.Popen, number: signal.Signals) -> None:
    """The launcher and each process that trains: what a scheduler reaches, and what launchers pass on comes a second time."""
    for one in (*ranks(process), psutil.Process(process.pid)):
        with suppress(psutil.NoSuchProcess):
            one.send_signal(number)


Send = Callable[[subprocess.Popen, signal.Signals], None]
TARGETS: dict[str, Send] = {
    "one process": to_one_process,
    "the launcher": to_launcher,
    "the launcher's group": to_group,
    "all processes": to_all,
}
