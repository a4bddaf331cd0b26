"""Signals that ask a run to stop, to one of its processes, to their launcher or to all: the run must save its
last step and continue when restarted."""

import itertools
import os
import random
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from benchmarks.faults.comparing import steps_lost
from benchmarks.faults.runs import KINDS, MOST_SECONDS, System, TrialRun, await_step
from benchmarks.faults.started import Started, wait
from benchmarks.faults.trials import Outcome, Suite, against, last_error, resumed, told, tried_once

STEPS, EVERY, STEPS_FOR_A_SIGNAL = 16, 8, 6
PAUSE: dict[str, Any] = {"kind": "pause", "seconds": 0.2}
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def send_signals(suite: Suite) -> list[dict[str, Any]]:
    """Each signal to each target, so many times; the plain Trainer gets each once, it handles none of them."""
    found = []
    for stage in suite.stages:
        for number, (processes, name, send) in itertools.product(NUMBERS, ways_of(stage)):
            fault, kind = f"{number.name} to {name}", KINDS[stage]
            if stage == 0 and processes > 1:
                kind = "DDP x 2"
            if suite.faults and fault not in suite.faults:
                continue
            for system in suite.systems:
                trial = (signalled, suite, system, stage, processes, number, send)
                times = suite.signals if system == "cpt" else min(1, suite.signals)
                found.append(told(fault, kind, system, [tried_once(*trial) for _ in range(times)]))
    return found


def ways_of(stage: int) -> list[tuple[int, str, "Send"]]:
    """How many processes, whom a signal is sent to, and what sends it."""
    to_two = [(2, name, send) for name, send in TARGETS.items()]
    return [(1, "its only process", to_launcher), *to_two] if stage == 0 else to_two


def signalled(
    suite: Suite, system: System, stage: int, processes: int, number: signal.Signals, send: "Send"
) -> Outcome:
    """Send it within a step drawn at random, start the run again, and compare it with the undisturbed one."""
    options: dict[str, Any] = {"steps": STEPS, "every": EVERY, "processes": processes}
    straight = suite.straight(f"signals-{processes}", system, stage, **options)
    run = suite.run(f"signal-{number.name}", system, stage, **options)
    how = how_it_ended(run, number, send, random.randint(2, STEPS - STEPS_FOR_A_SIGNAL))
    end = resumed(run, straight) if not run.is_done() else against(run, straight)
    return Outcome(how == SAVED and end.good and not steps_lost(run), f"{how}; then {end.what}")


SAVED, UNSAVED, UNHEARD, LATE = (
    "saved the step it was in",
    f"saved nothing, up to {EVERY} steps lost",
    "took no notice",
    "ended before the signal",
)


def how_it_ended(run: TrialRun, number: signal.Signals, send: "Send", at: int) -> str:
    """A start that gets the signal in this step."""
    process = run.start([PAUSE])
    if not await_step(run, process, at):
        wait(process, 1)
        return f"{LATE}: {last_error(run.said())}" if not run.is_done() else LATE
    members = ranks(process)  # a launcher that dies of the signal leaves them to nobody
    send(process, number)
    code = wait_for_all(process, members)
    if code == 0 or run.is_done():  # without a launcher, too
        return UNHEARD
    return SAVED if max(run.checkpoints(), default=0) >= at else UNSAVED


def wait_for_all(process: Started, members: list[psutil.Process]) -> int:
    """The launcher's exit code, once the run's own processes are gone too: it may go before them."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(MOST_SECONDS)
    psutil.wait_procs(members, timeout=120)
    return wait(process, 1)


def ranks(process: Started) -> list[psutil.Process]:
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


def to_one_process(process: Started, number: signal.Signals) -> None:
    """The last rank."""
    ranks(process)[-1].send_signal(number)


def to_launcher(process: Started, number: signal.Signals) -> None:
    """What was started."""
    process.send_signal(number)


def to_group(process: Started, number: signal.Signals) -> None:
    """The launcher's process group: what a terminal reaches."""
    os.killpg(process.pid, number)


def to_all(process: Started, number: signal.Signals) -> None:
    """The launcher and each process that trains: what a scheduler reaches, and what launchers pass on comes a second
    time."""
    for one in (*ranks(process), psutil.Process(process.pid)):
        with suppress(psutil.NoSuchProcess):
            one.send_signal(number)


Send = Callable[[Started, signal.Signals], None]
TARGETS: dict[str, Send] = {
    "one process": to_one_process,
    "the launcher": to_launcher,
    "the launcher's group": to_group,
    "all processes": to_all,
}
