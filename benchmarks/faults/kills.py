"""SIGKILL at any moment, most of the time inside a save: every start after it must go on, with the rows and weights of
a run left alone."""

import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.comparing import same_losses, same_weights, steps_lost, wrong_samples
from benchmarks.faults.moments import BETWEEN, Timetable, half_written, moment_of, save_times, wait_for_moment
from benchmarks.faults.runs import MOST_SECONDS, System, TrialRun, await_step
from benchmarks.faults.slow_disk import operations, slowed
from benchmarks.faults.started import Started, family_of, kill_all, wait
from benchmarks.faults.trials import last_error

STEPS, EVERY = 24, 3
PAUSE: dict[str, Any] = {
    "kind": "pause",
    "seconds": 0.1,
}  # of a micro-batch: steps of a tiny model are too short to be killed in
IN_SAVES, WHILE_STARTING = 0.6, 0.1  # shares of the kills; the others come from the first step on
MOST_STARTS_IN_VAIN, MOST_UNFINISHED = 3, 3


@dataclass
class Killed:
    """What the kills of one or more runs came to."""

    kills: int = 0
    inside_saves: int = 0
    moments: dict[str, int] = field(default_factory=dict)
    """In the middle of which operation of a save they came."""
    failed_resumes: int = 0
    runs: int = 0
    """That came to their end."""
    unfinished: int = 0
    wrong_samples: int = 0
    other_weights: int = 0
    other_losses: int = 0
    most_steps_lost: int = 0
    save_seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def kill_runs(
    work: Path, *, system: System, stage: int, kills: int, workers: int, forked: bool = False
) -> dict[str, Any]:
    """Kill runs of one kind so often, and hold each of them against the undisturbed one.

    Args:
        kills: in all, at least half of them inside saves.
        workers: runs at the same time.
    """
    name = f"kills{stage}"
    straight = slow_run(work, f"{name}-straight", system, stage, forked)
    began = time.monotonic()
    straight.straight()
    timetable = Timetable.of(straight, began)
    shares = [kills // workers + (number < kills % workers) for number in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        jobs = [
            pool.submit(kill_until, work, f"{name}-{number}", straight, share, timetable, random.Random())
            for number, share in enumerate(shares)
            if share
        ]
        all_of_them = [job.result() for job in jobs]
    found = total(all_of_them)
    found.save_seconds = save_times(straight)
    return {"system": system, **asdict(found)}


def slow_run(work: Path, name: str, system: System, stage: int, forked: bool = False) -> TrialRun:
    """A run on a slow disk."""
    home = work / f"{name}-{system}"
    disk = slowed(work, home / "runs", home / "disk.log")
    return TrialRun(work, name, system, stage, steps=STEPS, every=EVERY, environment=disk, forked=forked)


def kill_until(
    work: Path, name: str, straight: TrialRun, kills: int, timetable: Timetable, draw: random.Random
) -> Killed:
    """Run after run, until so many kills are spent and the last one has come to its end, or too many did not come to
    theirs."""
    found, number = Killed(), 0
    while found.kills < kills and found.unfinished < MOST_UNFINISHED:
        run = slow_run(work, f"{name}-{number}", straight.system, straight.stage, straight.forked)
        kill_one_run(run, kills, timetable, draw, found)
        number += 1
        judge(run, straight, found)
        print(f"{run.name}: {found}", flush=True)
        if found.other_weights == found.other_losses == found.wrong_samples == found.unfinished == 0:
            shutil.rmtree(run.home)  # what went wrong stays, to be looked at
    return found


def kill_one_run(run: TrialRun, kills: int, timetable: Timetable, draw: random.Random, found: Killed) -> None:
    """Start it again after each kill, to its end; where a start fails by itself, do what a person would do then."""
    vain = 0
    while not run.is_done() and vain < MOST_STARTS_IN_VAIN:
        began = time.monotonic()
        process = run.start([PAUSE])
        in_save = found.inside_saves <= IN_SAVES * found.kills
        aimed_at = killed_in(run, process, timetable, draw, in_save=in_save) if found.kills < kills else None
        if aimed_at is not None:
            count_kill(run, began, aimed_at, found)
            vain = 0
        elif wait(process, MOST_SECONDS) != 0:
            vain += 1
            found.failed_resumes += run.attempts > 1
            found.errors.append(last_error(run.said()))
            remove_newest(run)


def killed_in(
    run: TrialRun, process: Started, timetable: Timetable, draw: random.Random, *, in_save: bool
) -> str | None:
    """Wait for the moment of the kill, and kill; what was aimed at, None where the run ended before."""
    family: list[psutil.Process] | None = None
    aimed_at: str | None = "start"
    if not in_save and draw.random() < WHILE_STARTING / (1 - IN_SAVES):
        time.sleep(draw.uniform(0, timetable.starting))
    elif not await_step(run, process, 1):
        return None
    else:
        family, aimed_at = family_of(process), BETWEEN
        if in_save:
            aimed_at = wait_for_moment(run, process, timetable, draw)
        else:
            before = draw.choice((0.0, timetable.between_saves + timetable.saving))  # a save or none
            time.sleep(before + draw.uniform(0, timetable.between_saves))
    if process.poll() is not None:
        return None
    kill_all(process, family)
    return aimed_at


def count_kill(run: TrialRun, began: float, aimed_at: str, found: Killed) -> None:
    """Tell in the middle of what the kill came."""
    found.kills += 1
    has_begun = any(line["attempt"][0] == run.attempts for line in run.records())
    done = operations(run.home / "disk.log", after=began)
    moment = moment_of(done, half_written(run), aimed_at) if has_begun else "start"
    found.moments[moment] = found.moments.get(moment, 0) + 1
    found.inside_saves += moment not in ("start", BETWEEN)


def judge(run: TrialRun, straight: TrialRun, found: Killed) -> None:
    """Hold the finished run against the undisturbed one."""
    if not run.is_done():
        found.unfinished += 1
        return
    found.runs += 1
    found.wrong_samples += wrong_samples(run, straight)
    found.other_weights += not same_weights(run, straight)
    found.other_losses += not same_losses(run, straight)
    found.most_steps_lost = max(found.most_steps_lost, steps_lost(run))


def remove_newest(run: TrialRun) -> None:
    """What a person does when a checkpoint blocks every start: delete it."""
    if steps := run.checkpoints():
        shutil.rmtree(run.folder / f"checkpoint-{steps[-1]}")


def total(parts: list[Killed]) -> Killed:
    """All of them together."""
    found = Killed()
    for part in parts:
        for name in (
            "kills",
            "inside_saves",
            "failed_resumes",
            "runs",
            "unfinished",
            "wrong_samples",
            "other_weights",
            "other_losses",
        ):
            setattr(found, name, getattr(found, name) + getattr(part, name))
        found.most_steps_lost = max(found.most_steps_lost, part.most_steps_lost)
        found.save_seconds += part.save_seconds
        found.errors += part.errors
        for moment, count in part.moments.items():
            found.moments[moment] = found.moments.get(moment, 0) + count
    return found
