"""SIGKILL at any moment, most of the time inside a save: every start after it must go on, with the rows and weights of
a run left alone."""

import random
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.comparing import same_losses, same_weights, steps_lost, wrong_samples
from benchmarks.faults.runs import MOST_SECONDS, System, TrialRun, await_step
from benchmarks.faults.started import kill_all, wait
from benchmarks.faults.trials import last_error

STEPS, EVERY = 24, 3
PAUSE: dict[str, Any] = {
    "kind": "pause",
    "seconds": 0.1,
}  # else steps of a tiny model are too short to be killed in
IN_SAVES, WHILE_STARTING = 0.6, 0.1  # shares of the kills; the others come from the first step on
MOST_STARTS_IN_VAIN, MOST_UNFINISHED = 3, 3
START, BETWEEN, INSIDE = "start", "between saves", "inside a save"
SLOW_DISK = Path(__file__).with_name("slow_disk.c")
SECONDS_BETWEEN_LOOKS = 0.01


@dataclass
class Killed:
    """What the kills of one or more runs came to."""

    kills: int = 0
    inside_saves: int = 0
    moments: dict[str, int] = field(default_factory=dict)
    """How many came at the start, inside a save, and between saves."""
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


@dataclass(frozen=True)
class Timetable:
    """Seconds of an undisturbed run: until its first step, of each save, from one save to the next."""

    starting: float
    saves: list[float]
    between_saves: float

    @classmethod
    def of(cls, run: TrialRun) -> "Timetable":
        """Run it to its end, and watch it."""
        began, process = time.monotonic(), run.start([PAUSE])
        begins, ends = [], []
        while process.poll() is None:
            now, is_half_written = time.monotonic() - began, half_written(run)
            if is_half_written and len(begins) == len(ends):
                begins.append(now)
            elif not is_half_written and len(begins) > len(ends):
                ends.append(now)
            time.sleep(SECONDS_BETWEEN_LOOKS)
        if wait(process, 1) != 0 or len(ends) < 3:
            raise RuntimeError(f"{run.name} fails without any fault:\n{run.said()}")
        saves = [round(end - begin, 2) for begin, end in zip(begins, ends, strict=False)]
        return cls(run.records()[0]["time"] - began, saves, begins[2] - ends[1])


def kill_runs(work: Path, *, system: System, stage: int, kills: int) -> dict[str, Any]:
    """Kill runs of one kind so often, most of the time inside a save, and compare each with the undisturbed run.

    A run is started again after each kill. There are as many runs as it takes.
    """
    straight = slow_run(work, f"kills{stage}-straight", system, stage)
    timetable, draw = Timetable.of(straight), random.Random()
    found, number = Killed(save_seconds=timetable.saves), 0
    while found.kills < kills and found.unfinished < MOST_UNFINISHED:
        run = slow_run(work, f"kills{stage}-{number}", system, stage)
        kill_one_run(run, kills, timetable, draw, found)
        number += 1
        judge(run, straight, found)
        print(f"{run.name}: {found}", flush=True)
        if (
            found.other_weights
            == found.other_losses
            == found.wrong_samples
            == found.unfinished
            == 0
        ):
            shutil.rmtree(run.home)  # a run that went wrong stays
    return {"system": system, **asdict(found)}


def slow_run(work: Path, name: str, system: System, stage: int) -> TrialRun:
    """A run on a disk on which a save takes seconds."""
    library = work / "slow_disk.so"
    if not library.exists():
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-O2", "-o", library, SLOW_DISK, "-ldl"], check=True
        )
    disk = {
        "LD_PRELOAD": str(library),
        "SLOW_DISK_FOLDER": f"{work / f'{name}-{system}' / 'runs'}/",
        "SLOW_DISK_READS": "/.saving/",
        "SLOW_DISK_RATE": "160000",
        "SLOW_DISK_SYNC": "0.05",
        "SLOW_DISK_RENAME": "0.3",
    }
    return TrialRun(work, name, system, stage, steps=STEPS, every=EVERY, environment=disk)


def kill_one_run(
    run: TrialRun, kills: int, timetable: Timetable, draw: random.Random, found: Killed
) -> None:
    """Start it again after each kill, to its end; where a start fails by itself, do what a person would do then."""
    vain = 0
    while not run.is_done() and vain < MOST_STARTS_IN_VAIN:
        process = run.start([PAUSE])
        in_save = found.inside_saves <= IN_SAVES * found.kills
        if found.kills < kills and comes_to_its_moment(
            run, process, timetable, draw, in_save=in_save
        ):
            kill_all(process)
            count_kill(run, found)
            vain = 0
        elif wait(process, MOST_SECONDS) != 0:
            vain += 1
            found.failed_resumes += run.attempts > 1
            found.errors.append(last_error(run.said()))
            remove_newest(run)


def comes_to_its_moment(
    run: TrialRun,
    process: subprocess.Popen[bytes],
    timetable: Timetable,
    draw: random.Random,
    *,
    in_save: bool,
) -> bool:
    """Wait for the moment of the kill; False where the run ended before."""
    if not in_save and draw.random() < WHILE_STARTING / (1 - IN_SAVES):
        time.sleep(draw.uniform(0, timetable.starting))
        return process.poll() is None
    if not await_step(run, process, 1):
        return False
    if not in_save:
        before = draw.choice((0.0, timetable.between_saves + timetable.saves[0]))  # a save or none
        time.sleep(before + draw.uniform(0, timetable.between_saves))
        return process.poll() is None
    for number in range(
        draw.choice((1, 2))
    ):  # the first save of a process is read back, the others are not
        while number and half_written(run) and process.poll() is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        while not half_written(run) and process.poll() is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
    time.sleep(draw.uniform(0, timetable.saves[number]))
    return process.poll() is None


def half_written(run: TrialRun) -> bool:
    """Whether a save has begun and not ended."""
    if run.system == "cpt":
        return any((run.folder / ".saving").glob("checkpoint-*"))
    steps = run.checkpoints()
    return (
        bool(steps) and not (run.folder / f"checkpoint-{steps[-1]}" / "trainer_state.json").exists()
    )


def count_kill(run: TrialRun, found: Killed) -> None:
    found.kills += 1
    has_begun = any(line["attempt"][0] == run.attempts for line in run.records())
    moment = START if not has_begun else INSIDE if half_written(run) else BETWEEN
    found.moments[moment] = found.moments.get(moment, 0) + 1
    found.inside_saves += moment == INSIDE


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
