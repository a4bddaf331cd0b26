"""The heartbeat of each process: what it does and whether it makes progress, for whoever watches the run."""

import faulthandler
import math
import os
import signal
import socket
import statistics
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import LaunchError
from cpt.hardware import GIB
from cpt.ranks import rank, world_size
from cpt.runs.heartbeats import LastHeartbeat, Phase, write_heartbeat

STACKS = "stacks"
SECONDS_BETWEEN_WRITES = 1.0
SECONDS_BETWEEN_PULSES = 2.0
STEPS_LOOKED_AT = 20
SECONDS_BETWEEN_LOOKS = 10.0  # at the processor's time
LEAST_WORK = 0.01  # share of the time of one core, which waiting does not take and a slow disk still lets through
SIGNAL_FOR_STACKS = signal.SIGUSR2
OUTSIDE_OF_TRAINING = ("starting", "ending")


class Heartbeat(TrainerCallback):
    """Writes `heartbeats/rank-N.json`: `beats` counts progress, `pulse` only shows that the process is there.

    Progress is a step, a micro-batch or a batch of an evaluation. Before the first step and after the last one it is
    processor time: hashing checkpoints, tokenizing, compiling and merging take as long as they need. A thread writes
    the pulse every two seconds. At the end of its context the process writes which error ended it.

    SIGUSR2 writes the stacks of all threads to `stacks/rank-N.txt`, even while the process hangs in a library.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beats = self.pulse = 0
        self.ended: str | None = None
        self.seconds: deque[float] = deque(maxlen=STEPS_LOOKED_AT)
        self.step_began, self.written = 0.0, -math.inf
        stacks = folder / STACKS / f"rank-{rank()}.txt"
        stacks.parent.mkdir(parents=True, exist_ok=True)
        self.stacks = stacks.open("w")  # stays open: the signal may come at any time
        faulthandler.register(SIGNAL_FOR_STACKS, file=self.stacks, all_threads=True)
        self.phase: Phase = "starting"
        self.step = 0
        self.lock = threading.Lock()
        self.is_over = threading.Event()
        self.beat("starting", 0)

    def __enter__(self) -> "Heartbeat":
        """Start the thread that shows from here on that the process is there."""
        self.thread = threading.Thread(target=self.watch, name="cpt-heartbeat", daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_over.set()
        self.thread.join()
        self.ended = own_words(problem)
        self.tell()

    def watch(self) -> None:
        """Write a pulse. Outside of the training, processor time counts as progress; waiting for others takes next to
        none."""
        looked, worked = time.perf_counter(), seconds_worked()
        while not self.is_over.wait(SECONDS_BETWEEN_PULSES):
            now = time.perf_counter()
            with self.lock:
                if now - self.written >= SECONDS_BETWEEN_PULSES:
                    self.tell()
            if self.phase not in OUTSIDE_OF_TRAINING or now - looked < SECONDS_BETWEEN_LOOKS:
                continue
            worked_before, worked = worked, seconds_worked()
            is_busy = worked - worked_before >= LEAST_WORK * (now - looked)
            looked = now
            with self.lock:
                if is_busy and self.phase in OUTSIDE_OF_TRAINING:
                    self.write(self.phase, self.step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.step_began = time.perf_counter()
        self.beat("training", state.global_step)

    def on_substep_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.beat("training", state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.step_began)
        self.beat("between" if control.should_evaluate or control.should_save else "training", state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Evaluations before the first step and after the last are part of start and end."""
        self.beat("between" if self.phase == "training" else self.phase, state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.beat("ending", state.global_step)

    def beat(self, phase: Phase, step: int) -> None:
        with self.lock:
            self.write(phase, step)

    def write(self, phase: Phase, step: int) -> None:
        """Count progress; written at most once a second, but a new phase at once. The caller holds the lock."""
        self.beats += 1
        self.step = step
        now = time.perf_counter()
        if phase == self.phase and now - self.written < SECONDS_BETWEEN_WRITES:
            return
        self.phase = phase
        self.tell()

    def tell(self) -> None:
        self.written, self.pulse = time.perf_counter(), self.pulse + 1
        median = statistics.median(self.seconds) if len(self.seconds) >= 3 else None
        # Of all devices, since another thread's current device is 0 on every rank. This process uses one of them.
        peaks = (
            map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
            if torch.cuda.is_initialized()
            else ()
        )
        peak = max((round(peak / GIB, 3) for peak in peaks), default=None)
        sign = LastHeartbeat(
            rank(),
            os.getpid(),
            socket.gethostname(),
            self.phase,
            self.step,
            self.beats,
            median,
            peak,
            self.pulse,
            self.ended,
        )
        write_heartbeat(self.folder, sign)


def seconds_worked() -> float:
    """Processor time of this process and its children so far, without that of the calling thread."""
    this, total = psutil.Process(), -time.thread_time()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += sum(process.cpu_times()[:4])  # user and system, own and of children that ended
    return total


def lost_others(problem: BaseException) -> bool:
    """Whether a collective failed: a process that it needed is gone, cannot be reached, or took longer than the group
    waits."""
    if world_size() == 1 or not isinstance(problem, RuntimeError):
        return False
    # gloo raises plain RuntimeErrors, which begin with the place in its own sources.
    return isinstance(problem, dist.DistError) or "gloo/transport" in str(problem)


def own_words(problem: BaseException | None) -> str:
    """The error or the interruption that ended this process; empty if it succeeded or failed because of others."""
    if problem is None or isinstance(problem, SystemExit | LaunchError) or lost_others(problem):
        return ""
    return f"{type(problem).__name__}: {problem}"
