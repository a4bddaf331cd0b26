"""Moments of a save: which there are, how to wait for one that is drawn, and which one a kill met.

The phases of a save, write, hash, rename and the rename that publishes, are drawn with the same chance; then an
operation of the phase by how long it takes, and a moment of it. Otherwise most kills would meet the phase that takes
longest.
"""

import random
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath

from benchmarks.faults.runs import TrialRun
from benchmarks.faults.slow_disk import Operation, Watched, operations
from benchmarks.faults.started import Started

PUBLISHES = "rename that publishes"
BETWEEN, ELSE = "between saves", "reading back or between two files"
RAREST_FIRST = (PUBLISHES, "rename", "hash", "sync", "write")
PHASES = ("write", "hash", "rename", PUBLISHES)
SECOND_SAVE = 0.5  # share of the kills in saves: the first one of a process is read back, the others are not
Name = tuple[str, str, int]


@dataclass(frozen=True)
class Timetable:
    """When an undisturbed run did what.

    Args:
        saves: the first save of a process, and a later one.
        starting: seconds until its first step.
        between_saves: seconds from one to the next.
        saving: seconds that the first one takes, the longest.
    """

    saves: tuple[list[Operation], list[Operation]]
    starting: float
    between_saves: float
    saving: float

    @classmethod
    def of(cls, run: TrialRun, began: float) -> "Timetable":
        """Read from its records; it was started at this time of the monotonic clock."""
        saves = list(saves_of(run).values())
        begins = [min(one.began for one in save) for save in saves]
        times = [end_of(save) - begin for save, begin in zip(saves, begins, strict=True)]
        return cls((saves[0], saves[1]), run.records()[0]["time"] - began, begins[2] - begins[1] - times[1], times[0])


def wait_for_moment(run: TrialRun, process: Started, timetable: Timetable, draw: random.Random) -> str | None:
    """Wait for a moment in the next save, or in the one after it; its phase, None where the run ended before."""
    second = draw.random() < SECOND_SAVE
    phase, wanted, seconds = drawn(timetable.saves[second], draw)
    log = Watched(run.home / "disk.log", after=time.monotonic())
    begun: list[str] = []
    seen: Counter[tuple[str, str]] = Counter()
    while True:
        for operation in log.look():
            if (checkpoint := checkpoint_of(operation)) not in begun:
                begun.append(checkpoint)
                seen.clear()
            seen[name_of(operation)] += 1
            if len(begun) == 1 + second and (*name_of(operation), seen[name_of(operation)]) == wanted:
                time.sleep(max(0.0, operation.began + seconds - time.monotonic()))
                return phase
        if process.poll() is not None:
            return None
        time.sleep(0.01)


def drawn(save: list[Operation], draw: random.Random) -> tuple[str, Name, float]:
    """A phase of a save, an operation of it, as its name and which of that name it is, and seconds from its
    beginning."""
    phases = [phase for phase in PHASES if any(phase_of(one) == phase for one in save)]
    phase = draw.choice(phases)
    of_it = [one for one in save if phase_of(one) == phase]
    operation = draw.choices(of_it, [length(one) for one in of_it])[0]
    before = [one for one in save[: save.index(operation) + 1] if name_of(one) == name_of(operation)]
    return phase, (*name_of(operation), len(before)), draw.uniform(0, length(operation))


def phase_of(operation: Operation) -> str:
    """What it belongs to."""
    return PUBLISHES if publishes(operation) else operation.what


def name_of(operation: Operation) -> tuple[str, str]:
    """The same in every save of a run: names of temporary files are drawn, those of checkpoints have numbers."""
    name = PurePath(operation.path).name
    return operation.what, ".tmp" if name.startswith(".tmp") else re.sub(r"\d+$", "N", name)


def length(operation: Operation) -> float:
    """Seconds."""
    return (operation.ended or operation.began) - operation.began


def publishes(operation: Operation) -> bool:
    """The one rename that makes a checkpoint."""
    return operation.what == "rename" and PurePath(operation.path).name.startswith("checkpoint-")


def saves_of(run: TrialRun) -> dict[str, list[Operation]]:
    """The operations of each save, by the checkpoint's name."""
    saves: dict[str, list[Operation]] = {}
    for one in operations(run.home / "disk.log"):
        saves.setdefault(checkpoint_of(one), []).append(one)
    return saves


def save_times(run: TrialRun) -> list[float]:
    """Seconds from the first write of each save to its last operation."""
    return [round(end_of(save) - min(one.began for one in save), 2) for save in saves_of(run).values()]


def end_of(save: list[Operation]) -> float:
    """Of its last operation."""
    return max(one.ended or one.began for one in save)


def checkpoint_of(operation: Operation) -> str:
    """The checkpoint's name in a path."""
    return next(part for part in operation.path.split("/") if part.startswith("checkpoint-"))


def moment_of(done: list[Operation], is_half_written: bool, aimed_at: str | None = None) -> str:
    """The phase that had not ended; of several at once the one that was aimed at, or else the rarest."""
    cut = {phase_of(one) for one in done if one.ended is None}
    return next((what for what in (aimed_at, *RAREST_FIRST) if what in cut), None) or (
        ELSE if is_half_written else BETWEEN
    )


def half_written(run: TrialRun) -> bool:
    """Whether a save had begun and not ended."""
    if run.system == "cpt":
        return any((run.folder / ".saving").glob("checkpoint-*"))
    steps = run.checkpoints()
    return bool(steps) and not (run.folder / f"checkpoint-{steps[-1]}" / "trainer_state.json").exists()
