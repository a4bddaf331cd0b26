"""Effective training time and failed jobs: supervised runs whose processes are killed at moments drawn at random.

A failure costs the time until it is noticed and the start of new processes, which are measured; and the steps since
the last checkpoint, trained again, which depend on how often a run saves:

    cost of a failure   = (wall clock with failures - wall clock without - seconds of steps made again) / failures
    effective training  = M / (M + cost + I / 2),   with one failure in M seconds of training and a save every I
    seconds

M and I are a large job's, since a run of a minute says nothing of its own: Llama 3 405B had 419 unexpected
interruptions in 54 days, one in 3.1 hours, and a save every ten minutes means five minutes of training again on the
average. The cost of loading a large checkpoint is not in it. A job counts as failed where it does not come to its end
by itself, or not to the weights of the undisturbed one. A supervisor gives up when the same step fails three times, so
the kills are spread over the job: three within the first step after each start end it rightly.
"""

import random
import time
from typing import Any

from benchmarks.faults.runs import KINDS, MOST_SECONDS, TrialRun
from benchmarks.faults.signals import ranks
from benchmarks.faults.started import kill_all, wait
from benchmarks.faults.trials import Suite, against

STEPS, EVERY, FAILURES = 48, 4, 3
PAUSE: dict[str, Any] = {"kind": "pause", "seconds": 0.2}
SECONDS_OF_A_STEP = 2 * PAUSE["seconds"]  # two micro-batches
SECONDS_BETWEEN_FAILURES = 54 * 86400 / 419
SECONDS_BETWEEN_SAVES = 600.0


def disturb_jobs(suite: Suite) -> list[dict[str, Any]]:
    """So many jobs of each kind of run."""
    return [
        {"run": KINDS[stage], "system": "cpt", "jobs": jobs_of(suite, stage)}
        for stage in suite.stages
    ]


def jobs_of(suite: Suite, stage: int) -> list[dict[str, Any]]:
    """Beside an undisturbed one."""
    draw = random.Random()
    options: dict[str, Any] = {"steps": STEPS, "every": EVERY, "processes": 2}
    straight = suite.run("job-straight", "cpt", stage, **options)
    began = time.monotonic()
    if straight.finish([PAUSE], supervised=True) != 0:
        raise SystemExit(straight.said())
    undisturbed = time.monotonic() - began
    jobs: list[dict[str, Any]] = []
    for _ in range(suite.repetitions):
        seconds, failures, again, failed = disturbed_job(suite, straight, draw, options)
        jobs.append(
            {
                "seconds": seconds,
                "undisturbed": undisturbed,
                "again": again,
                "failures": failures,
                "failed": failed,
            }
        )
        print(f"supervised job, {KINDS[stage]}: {jobs[-1]}", flush=True)
    return jobs


def effective(cost: float) -> float:
    """The share of time that is training which counts."""
    return SECONDS_BETWEEN_FAILURES / (SECONDS_BETWEEN_FAILURES + cost + SECONDS_BETWEEN_SAVES / 2)


def disturbed_job(
    suite: Suite, straight: TrialRun, draw: random.Random, options: dict[str, Any]
) -> tuple[float, int, float, bool]:
    """Seconds to its end, failures on the way, seconds of steps made again, and whether it failed."""
    run = suite.run("job", "cpt", straight.stage, **options)
    began, failures = time.monotonic(), 0
    process = run.start([PAUSE], supervised=True)
    for restarts in range(FAILURES):
        if not trains(run, process, restarts):
            break
        time.sleep(draw.uniform(0, STEPS * SECONDS_OF_A_STEP / FAILURES))
        members = ranks(process)
        if process.poll() is not None or not members:
            break
        draw.choice(members).kill()
        failures += 1
    code = wait(process, MOST_SECONDS)
    kill_all(process)
    seconds = time.monotonic() - began
    again = (sum(len(attempt) for attempt in run.attempts_made()) - STEPS) * seconds_per_step(
        straight
    )
    return seconds, failures, again, code != 0 or not against(run, straight).good


def seconds_per_step(run: TrialRun) -> float:
    """From the first step's beginning to the last one's, saves included."""
    times = [line["time"] for line in run.records() if "begin" in line]
    return (max(times) - min(times)) / (STEPS - 1)


def trains(run: TrialRun, process: Any, restarts: int) -> bool:
    """Wait until the start after so many restarts makes a step; False where the job ended."""
    give_up = time.monotonic() + MOST_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        if any(line["attempt"][1] >= restarts for line in run.records()):
            return True
        time.sleep(0.1)
    return False
