"""Signs of life of each process, for whoever watches the run from outside: what it does, and that it goes on doing
it."""

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

from cpt.errors import Interrupted, LaunchError
from cpt.hardware import GIB
from cpt.ranks import rank, world_size
from cpt.runs.signs import Phase, Sign, write_sign

STACKS = "stacks"
SECONDS_BETWEEN_WRITES = 1.0
SECONDS_BETWEEN_PULSES = 2.0
STEPS_LOOKED_AT = 20
SECONDS_BETWEEN_LOOKS = 10.0  # at the processor's time
LEAST_WORK = 0.01  # share of the time of one core, which waiting does not take and a slow disk still lets through
SIGNAL_FOR_STACKS = signal.SIGUSR2


class Heartbeat(TrainerCallback):
    """Writes `heartbeats/rank-N.json` at most once in a second, where there was progress; hung processes count no
    beats on.

    A thread writes it every two seconds at least, so that others see that the process is there, whatever it waits for.
    At the end of its context the process says there which error of its own ended it.

    Progress is a step, a micro-batch, a batch of an evaluation. Before the first step and after the last, while its
    context is open, it is the processor's time: hashing checkpoints, converting them, tokenising, compiling and
    merging take as long as they need.

    SIGUSR2 makes the process write the stacks of all its threads to `stacks/rank-N.txt`, also when it hangs in a
    library.

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
        """Show from here on that the process is there, and look at the processor's time."""
        self.threads = [
            threading.Thread(target=work, name="cpt-heartbeat", daemon=True)
            for work in (self.watch_work, self.give_pulse)
        ]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The run is over."""
        self.is_over.set()
        for thread in self.threads:
            thread.join()
        self.ended = own_words(problem)
        self.tell()

    def give_pulse(self) -> None:
        """Write where nothing was written for a while."""
        while not self.is_over.wait(SECONDS_BETWEEN_PULSES):
            with self.lock:
                if time.perf_counter() - self.written >= SECONDS_BETWEEN_PULSES:
                    self.tell()

    def watch_work(self) -> None:
        """Beat where this process, or one that it started, works; one that waits for others takes next to no time.

        The system is asked for other processes only where this one is idle: each of some hundred questions would wait
        for Python's lock.
        """
        own, below = time.process_time(), None
        while not self.is_over.wait(SECONDS_BETWEEN_LOOKS):
            least = LEAST_WORK * SECONDS_BETWEEN_LOOKS
            own_before, own = own, time.process_time()
            below_before, below = below, None
            with self.lock:
                phase = self.phase
            if phase not in ("starting", "ending"):
                continue
            works = own - own_before >= least
            if not works:
                below = seconds_below()
                works = below_before is not None and below - below_before >= least
            with self.lock:
                if works and self.phase == phase:
                    self.write(phase, self.step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step's forward begins."""
        self.step_began = time.perf_counter()
        self.beat("training", state.global_step)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A micro-batch is done."""
        self.beat("training", state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step is done."""
        self.seconds.append(time.perf_counter() - self.step_began)
        self.beat("between" if control.should_evaluate or control.should_save else "training", state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A batch of an evaluation is done, or a sample; those before the first step and after the last are part of
        start and end."""
        self.beat("between" if self.phase == "training" else self.phase, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model will be exported."""
        self.beat("ending", state.global_step)

    def beat(self, phase: Phase, step: int) -> None:
        """Say that there is progress; at once where another phase begins, for each has a patience of its own."""
        with self.lock:
            self.write(phase, step)

    def write(self, phase: Phase, step: int) -> None:
        """The same, while nobody else does."""
        self.beats += 1
        self.step = step
        now = time.perf_counter()
        if phase == self.phase and now - self.written < SECONDS_BETWEEN_WRITES:
            return
        self.phase = phase
        self.tell()

    def tell(self) -> None:
        """Write what is so now."""
        self.written, self.pulse = time.perf_counter(), self.pulse + 1
        median = statistics.median(self.seconds) if len(self.seconds) >= 3 else None
        # Of all devices, since another thread's current device is 0 on every rank. This process uses one of them.
        peaks = (
            map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
            if torch.cuda.is_initialized()
            else ()
        )
        peak = max((round(peak / GIB, 3) for peak in peaks), default=None)
        sign = Sign(
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
        write_sign(self.folder, sign)


def seconds_below() -> float:
    """The processor's time that the processes below this one took so far, theirs included."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def lost_others(problem: BaseException) -> bool:
    """Whether a collective failed: a process that it needed is gone, cannot be reached, or took longer than the group
    waits."""
    if world_size() == 1 or not isinstance(problem, RuntimeError):
        return False
    # gloo raises plain RuntimeErrors, which begin with the place in its own sources.
    return isinstance(problem, dist.DistError) or "gloo/transport" in str(problem)


def own_words(problem: BaseException | None) -> str:
    """The error that ended this process; empty where it ended well, because it was told to, or because of others."""
    if (
        problem is None
        or isinstance(problem, Interrupted | KeyboardInterrupt | SystemExit | LaunchError)
        or lost_others(problem)
    ):
        return ""
    return f"{type(problem).__name__}: {problem}"
