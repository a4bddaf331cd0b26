"""Signs of life of each process, for whoever watches the run from outside: what it does, and that it goes on doing it."""

import faulthandler
import json
import os
import signal
import socket
import statistics
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.ranks import rank

FOLDER, STACKS = "heartbeats", "stacks"
SECONDS_BETWEEN_WRITES = 1.0
STEPS_LOOKED_AT = 20
SIGNAL_FOR_STACKS = signal.SIGUSR2
Phase = Literal["starting", "training", "between", "ending"]


@dataclass(frozen=True)
class Sign:
    """What one process last said."""

    rank: int
    pid: int
    host: str
    phase: Phase
    """Starting: before the first step. Between: after a step that is followed by an evaluation or a save. Ending: after the last."""
    step: int
    beats: int
    """Counts on as long as there is progress; whoever watches needs no clock of this machine."""
    seconds_per_step: float | None
    """Median of the last 20 steps; None before three of them."""


class Heartbeat(TrainerCallback):
    """Writes `heartbeats/rank-N.json` at most once in a second, where there was progress; hung processes write nothing.

    SIGUSR2 makes the process write the stacks of all its threads to `stacks/rank-N.txt`, also when it hangs in a library.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beats = 0
        self.seconds: deque[float] = deque(maxlen=STEPS_LOOKED_AT)
        self.step_began = self.written = 0.0
        stacks = folder / STACKS / f"rank-{rank()}.txt"
        stacks.parent.mkdir(parents=True, exist_ok=True)
        self.stacks = stacks.open("w")  # stays open: the signal may come at any time
        faulthandler.register(SIGNAL_FOR_STACKS, file=self.stacks, all_threads=True)
        self.phase: Phase | None = None
        self.beat("starting", 0)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step's forward begins."""
        self.step_began = time.perf_counter()
        self.beat("training", state.global_step)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A micro-batch is done."""
        self.beat("training", state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A step is done."""
        self.seconds.append(time.perf_counter() - self.step_began)
        self.beat("between" if control.should_evaluate or control.should_save else "training", state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The model will be exported."""
        self.beat("ending", state.global_step)

    def beat(self, phase: Phase, step: int) -> None:
        """Say that there is progress; at once where another phase begins, for each has a patience of its own."""
        self.beats += 1
        now = time.perf_counter()
        if phase == self.phase and now - self.written < SECONDS_BETWEEN_WRITES:
            return
        self.phase, self.written = phase, now
        median = statistics.median(self.seconds) if len(self.seconds) >= 3 else None
        sign = Sign(rank(), os.getpid(), socket.gethostname(), phase, step, self.beats, median)
        write_sign(self.folder, sign)


def write_sign(folder: Path, sign: Sign) -> None:
    """Whole or not at all; a full disk must not end a run because of its pulse."""
    path = folder / FOLDER / f"rank-{sign.rank}.json"
    beside = path.with_suffix(f".{sign.pid}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(asdict(sign)))
        beside.replace(path)
    except OSError:
        with suppress(OSError):
            beside.unlink()


def read_signs(folder: Path) -> list[Sign]:
    """What the processes of a run last said, by rank."""
    signs = []
    for path in sorted((folder / FOLDER).glob("rank-*.json")):
        try:
            signs.append(Sign(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):  # another version's, or gone meanwhile
            continue
    return sorted(signs, key=lambda sign: sign.rank)


def forget_signs(folder: Path) -> None:
    """Before processes are started anew."""
    for path in (folder / FOLDER).glob("rank-*"):
        path.unlink(missing_ok=True)
