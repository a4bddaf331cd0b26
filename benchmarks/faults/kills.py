"""SIGKILL at any moment, half of the time inside a save: every start after it must go on, with the rows and weights of a run left alone."""

import random
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.comparing import same_losses, same_weights, steps_lost, wrong_samples
from benchmarks.faults.runs import MOST_SECONDS, System, TrialRun, await_step, kill_all, wait
from benchmarks.faults.slow_disk import Operation, operations, slowed
from benchmarks.faults.trials import last_error

STEPS, EVERY = 24, 3
BETWEEN, ELSE = "between saves", "reading back or between two files"
PAUSE: dict[str, Any] = {"kind": "pause", "seconds": 0.3}  # steps of a tiny model are too short to be killed in
MOST_STARTS_IN_VAIN = 3


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


def kill_runs(work: Path, *, system: System, stage: int, kills: int, workers: int, seed: int = 0) -> dict[str, Any]:
    """Kill runs of one kind so often, and hold each of them against the undisturbed one.

    Args:
        kills: in all, at least half of them inside saves.
        workers: runs at the same time.
    """
    name = f"kills{stage}"
    straight = slow_run(work, f"{name}-straight", system, stage).straight()
    seconds = save_times(straight)
    shares = [kills // workers + (number < kills % workers) for number in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        jobs = [
            pool.submit(kill_until, work, f"{name}-{number}", straight, share, seconds, random.Random(seed + number))
            for number, share in enumerate(shares)
            if share
        ]
        all_of_them = [job.result() for job in jobs]
    found = total(all_of_them)
    found.save_seconds = seconds
    return {"system": system, **asdict(found)}


def slow_run(work: Path, name: str, system: System, stage: int) -> TrialRun:
    """A run on a slow disk."""
    home = work / f"{name}-{system}"
    disk = slowed(work, home / "runs", home / "disk.log")
    return TrialRun(work, name, system, stage, steps=STEPS, every=EVERY, environment=disk)


def kill_until(work: Path, name: str, straight: TrialRun, kills: int, seconds: list[float], draw: random.Random) -> Killed:
    """Run after run, until so many kills are spent and the last one has come to its end.

    Args:
        seconds: that saves take; the first of a process, which is the one that is killed, takes longest.
    """
    found, number = Killed(), 0
    while found.kills < kills:
        run = slow_run(work, f"{name}-{number}", straight.system, straight.stage)
        kill_one_run(run, kills, seconds[0], draw, found)
        number += 1
        judge(run, straight, found)
    return found


def kill_one_run(run: TrialRun, kills: int, save_seconds: float, draw: random.Random, found: Killed) -> None:
    """Start it again after each kill, to its end; where a start fails by itself, do what a person would do then."""
    vain = 0
    while not run.is_done() and vain < MOST_STARTS_IN_VAIN:
        began = time.monotonic()
        process = run.start([PAUSE])
        in_save = found.inside_saves * 2 <= found.kills
        if found.kills < kills and wait_for_moment(run, process, save_seconds, draw, in_save=in_save):
            kill_all(process)
            count_kill(run, began, found)
            vain = 0
        elif wait(process, MOST_SECONDS) != 0:
            vain += 1
            found.failed_resumes += run.attempts > 1
            found.errors.append(last_error(run.said()))
            remove_newest(run)


def wait_for_moment(run: TrialRun, process: subprocess.Popen, save_seconds: float, draw: random.Random, *, in_save: bool) -> bool:
    """Wait for the moment of the kill: somewhere in the next save, or anywhere from the first step on; False where the run ended before."""
    if not await_step(run, process, 1):
        return False
    if in_save:
        begun = time.monotonic()
        while not operations(run.home / "disk.log", after=begun):
            if process.poll() is not None:
                return False
            time.sleep(0.02)
        time.sleep(draw.uniform(0, save_seconds))
    else:
        time.sleep(draw.uniform(0, 2 * EVERY * PAUSE["seconds"] + save_seconds))
    return process.poll() is None


def save_times(run: TrialRun) -> list[float]:
    """Seconds from the first write of each save to its last operation."""
    spans: dict[str, list[float]] = {}
    for one in operations(run.home / "disk.log"):
        spans.setdefault(checkpoint_of(one), []).extend([one.began, one.ended or one.began])
    return [round(max(times) - min(times), 2) for times in spans.values()]


def checkpoint_of(operation: Operation) -> str:
    """The checkpoint's name in a path."""
    return next(part for part in operation.path.split("/") if part.startswith("checkpoint-"))


def count_kill(run: TrialRun, began: float, found: Killed) -> None:
    """Tell in the middle of what the kill came."""
    found.kills += 1
    moment = moment_of(operations(run.home / "disk.log", after=began), half_written(run))
    found.moments[moment] = found.moments.get(moment, 0) + 1
    found.inside_saves += moment != BETWEEN


def moment_of(done: list[Operation], is_half_written: bool) -> str:
    """The operation that had not ended, of several at once the rarest."""
    cut = {"rename that publishes" if publishes(one) else one.what for one in done if one.ended is None}
    rarest_first = ("rename that publishes", "rename", "hash", "sync", "write")
    return next((what for what in rarest_first if what in cut), ELSE if is_half_written else BETWEEN)


def publishes(operation: Operation) -> bool:
    """The one rename that makes a checkpoint."""
    return operation.what == "rename" and operation.path.rpartition("/")[2].startswith("checkpoint-")


def half_written(run: TrialRun) -> bool:
    """Whether a save had begun and not ended."""
    if run.system == "cpt":
        return any((run.folder / ".saving").glob("checkpoint-*"))
    steps = run.checkpoints()
    return bool(steps) and not (run.folder / f"checkpoint-{steps[-1]}" / "trainer_state.json").exists()


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
        for name in ("kills", "inside_saves", "failed_resumes", "runs", "unfinished", "wrong_samples", "other_weights", "other_losses"):
            setattr(found, name, getattr(found, name) + getattr(part, name))
        found.most_steps_lost = max(found.most_steps_lost, part.most_steps_lost)
        found.errors += part.errors
        for moment, count in part.moments.items():
            found.moments[moment] = found.moments.get(moment, 0) + count
    return found
