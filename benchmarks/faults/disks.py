"""Disks that are full for a while, or cannot be written: real ones, in memory, where the system lets us mount them."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.faults.runs import MOST_SECONDS, System, TrialRun, await_step
from benchmarks.faults.started import wait
from benchmarks.faults.trials import Outcome, Suite, Trial, against, last_error, resumed, tried

STEPS, EVERY = 16, 4
PAUSE: dict[str, Any] = {"kind": "pause", "seconds": 0.5}
ROOM = 100_000  # bytes that are left: less than any file of weights, enough for lines of a log


def spoil_disks(suite: Suite) -> list[dict[str, Any]]:
    """All faults of disks; nothing where nobody may mount."""
    if not may_mount(suite.work):
        print(
            "Not run: disk full and read-only (mounting is not allowed here; run as root).",
            flush=True,
        )
        return []
    return tried(suite, FAULTS)


def disk_full(suite: Suite, system: System, stage: int) -> Outcome:
    """After the first checkpoint the disk fills up; before the third save there is room again."""
    straight = suite.straight("bad-steps", system, stage, steps=STEPS, every=EVERY)
    run = suite.run("full", system, stage, steps=STEPS, every=EVERY)
    with mounted(run.home / "runs", "size=64m") as disk:
        process = run.start([PAUSE])
        await_step(run, process, EVERY + 1)
        await_checkpoint(run, EVERY)
        filler = fill(disk)
        await_step(run, process, 2 * EVERY + 2)
        least = run.checkpoints()
        filler.unlink()
        code = wait(process, MOST_SECONDS)
        if code == 0:
            outcome = against(run, straight)
            kept = EVERY in least and EVERY * 3 in run.checkpoints()
            return Outcome(
                outcome.good and kept, f"went on, the next save succeeded; {outcome.what}"
            )
        error, outcome = last_error(run.said()), resumed(run, straight)
        return Outcome(False, f"ended with code {code} ({error}); with room again: {outcome.what}")


def read_only(suite: Suite, system: System, stage: int) -> Outcome:
    """The run's folder cannot be written."""
    run = suite.run("read-only", system, stage, steps=STEPS, every=EVERY)
    with mounted(run.home / "runs", "size=1m") as disk:
        run.folder.mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code = run.finish()
        steps, said = max(run.made(), default=0), run.said()
    named = str(run.home / "runs") in last_error(said) or str(run.folder) in said
    where = "before step 1" if steps == 0 else f"in step {steps}, all work lost"
    return Outcome(
        code != 0 and steps == 0 and named,
        f"ended with code {code} {where}, {'naming' if named else 'not naming'} the folder",
    )


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A disk of its own, in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def may_mount(work: Path) -> bool:
    """Whether this user can."""
    folder = work / "mount"
    folder.mkdir(parents=True, exist_ok=True)
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True
        ).returncode
        != 0
    ):
        return False
    subprocess.run(["umount", str(folder)], check=True)
    return True


def fill(disk: Path) -> Path:
    """A file that takes all but a little."""
    state, filler = os.statvfs(disk), disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_frsize - ROOM)
    return filler


def await_checkpoint(run: TrialRun, step: int, seconds: float = 120.0) -> None:
    """Until it is written whole."""
    give_up = time.monotonic() + seconds
    while (
        not (run.folder / f"checkpoint-{step}" / "trainer_state.json").exists()
        and time.monotonic() < give_up
    ):
        time.sleep(0.05)


FAULTS: dict[str, Trial] = {"disk full for a while": disk_full, "folder is read-only": read_only}
