"""Heartbeats of all processes, and the lost ranks when a collective fails."""

import faulthandler
import logging
import math
import os
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.checkpoints.resume import published_checkpoints
from cpt.distributed import rank, same_command, world_size
from cpt.errors import (
    Interrupted,
    LaunchError,
)
from cpt.hardware import GIB
from cpt.runs.events import (
    SIGNAL_FOR_STACKS,
    STACKS,
    LastHeartbeat,
    Phase,
    is_of_this_host,
    name_processes,
    read_heartbeats,
    record_event,
    write_heartbeat,
)
from cpt.runs.folder import is_alive
from cpt.runs.record import Run
from cpt.torch_internals import set_group_timeouts

log = logging.getLogger("cpt")
SECONDS_BETWEEN_WRITES = 1.0
SECONDS_BETWEEN_PULSES = 2.0
STEPS_LOOKED_AT = 20
SECONDS_BETWEEN_CPU_LOOKS = 10.0  # at processor time
LEAST_WORK = 0.01  # share of one core: waiting uses less, work on a slow disk uses more
OUTSIDE_OF_TRAINING = ("starting", "ending")
SECONDS_FOR_AN_ANSWER = 8.0  # four pulses
SECONDS_BETWEEN_LOOKS = 0.2


class Heartbeat(TrainerCallback):
    """Writes `heartbeats/rank-N.json`: `beats` counts progress, `pulse` only shows that the process exists.

    Progress is a step, a micro-batch or an evaluation batch. Before the first and after the last step it is processor
    time, since hashing checkpoints, tokenizing, compiling and merging may take long. A thread writes the pulse every
    two seconds. At the end of its context the process records the error that ended it.

    SIGUSR2 writes the stacks of all threads to `stacks/rank-N.txt`, even while the process hangs in a library.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.beats = self.pulse = 0
        self.ended: str | None = None
        self.seconds: deque[float] = deque(maxlen=STEPS_LOOKED_AT)
        self.step_began = 0.0
        self.written = -math.inf
        stacks = folder / STACKS / f"rank-{rank()}.txt"
        stacks.parent.mkdir(parents=True, exist_ok=True)
        self.stacks = stacks.open("w")  # stays open: the signal may come at any time
        faulthandler.register(SIGNAL_FOR_STACKS, file=self.stacks, all_threads=True)
        self.phase: Phase = "starting"
        self.step = 0
        self.lock = threading.RLock()
        self.is_over = threading.Event()
        self.beat("starting", 0)

    def __enter__(self) -> "Heartbeat":
        self.thread = threading.Thread(target=self.watch, name="cpt-heartbeat", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, kind: object, problem: BaseException | None, trace: object) -> None:
        self.is_over.set()
        self.thread.join()
        self.ended = own_words(problem)
        self.write()

    def watch(self) -> None:
        """Outside of training, count processor time as progress; waiting for others uses almost none."""
        looked = time.perf_counter()
        worked = seconds_worked()
        while not self.is_over.wait(SECONDS_BETWEEN_PULSES):
            seconds_now = time.perf_counter()
            with self.lock:
                if seconds_now - self.written >= SECONDS_BETWEEN_PULSES:
                    self.write()
            if (
                self.phase not in OUTSIDE_OF_TRAINING
                or seconds_now - looked < SECONDS_BETWEEN_CPU_LOOKS
            ):
                continue
            worked_before = worked
            worked = seconds_worked()
            is_busy = worked - worked_before >= LEAST_WORK * (seconds_now - looked)
            looked = seconds_now
            with self.lock:
                if is_busy and self.phase in OUTSIDE_OF_TRAINING:
                    self.beat(self.phase, self.step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.step_began = time.perf_counter()
        self.beat("training", state.global_step)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.beat("training", state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.seconds.append(time.perf_counter() - self.step_began)
        self.beat(
            "between" if control.should_evaluate or control.should_save else "training",
            state.global_step,
        )

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Evaluations before the first and after the last step count as start and end."""
        self.beat("between" if self.phase == "training" else self.phase, state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.beat("ending", state.global_step)

    def beat(self, phase: Phase, step: int) -> None:
        """Count progress; write it at most once a second, but a new phase immediately."""
        with self.lock:
            self.beats += 1
            self.step = step
            if phase != self.phase or time.perf_counter() - self.written >= SECONDS_BETWEEN_WRITES:
                self.phase = phase
                self.write()

    def write(self) -> None:
        self.written = time.perf_counter()
        self.pulse = self.pulse + 1
        median = statistics.median(self.seconds) if len(self.seconds) >= 3 else None
        # Sum over all devices, since the current device of another thread is always 0. This process uses one.
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        peak = max(
            (round(torch.cuda.max_memory_allocated(device) / GIB, 3) for device in devices),
            default=None,
        )
        process = (rank(), os.getpid(), socket.gethostname())
        sign = LastHeartbeat(
            *process, self.phase, self.step, self.beats, median, peak, self.pulse, self.ended
        )
        write_heartbeat(self.folder, sign)


def seconds_worked() -> float:
    """Return the processor time of this process and its children, without the calling thread's."""
    this = psutil.Process()
    total = -time.thread_time()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += sum(process.cpu_times()[:4])  # user and system time, including ended children
    return total


def lost_others(problem: BaseException) -> bool:
    """Whether a collective failed: a process is gone, unreachable, or exceeded the timeout."""
    if world_size() == 1 or not isinstance(problem, RuntimeError):
        return False
    # gloo raises plain RuntimeErrors, which begin with a position in its sources.
    return isinstance(problem, dist.DistError) or "gloo/transport" in str(problem)


def own_words(problem: BaseException | None) -> str:
    """Describe the error that ended this process; empty if it succeeded or failed because of others."""
    if problem is None or isinstance(problem, SystemExit | LaunchError) or lost_others(problem):
        return ""
    return f"{type(problem).__name__}: {problem}"


def resumes_from(folder: Path) -> str:
    checkpoints = published_checkpoints(folder)
    if checkpoints:
        return f"{same_command()} resumes from {checkpoints[-1].name}."
    return "Nothing was saved yet."


@contextmanager
def lost_ranks_named(run: Run) -> Iterator[None]:
    """Convert a failed collective to a LaunchError that names the lost processes, or to Interrupted."""
    try:
        yield
    except RuntimeError as problem:
        if not lost_others(problem):
            raise
        gone, failed = find_lost_ranks(run.folder)
        everyone = read_heartbeats(run.folder)
        interrupted = [sign for sign in failed if str(sign.ended).startswith(Interrupted.__name__)]
        if interrupted:
            who = name_processes(interrupted, everyone)
            raise Interrupted(
                f"{who} was stopped by a signal. {resumes_from(run.folder)}"
            ) from problem
        if failed:
            ended = []
            for sign in failed:
                ended.append(f"{name_processes([sign], everyone)} ended with {sign.ended}")
            description = f"{'; '.join(ended)}. The others cannot continue without it."
        elif gone:
            steps = ", ".join(sorted({str(sign.step) for sign in gone}))
            description = (
                f"{name_processes(gone, everyone)} is gone: its last heartbeat is of step {steps}."
            )
        else:
            description = (
                "All processes exist, but lost their connection: the network failed, or one took longer"
                f" than `training.ddp_timeout`. {type(problem).__name__}: {problem}."
            )
        message = f"{description} {resumes_from(run.folder)}"
        lost = [sign.rank for sign in (*gone, *failed)]
        if rank() == min(
            set(range(world_size())) - set(lost), default=0
        ):  # the lowest remaining rank reports
            step = max((sign.step for sign in everyone), default=None)
            record_event(run.folder, "lost", message, step=step, processes=lost)
            if rank() != 0:  # the main process is lost
                run.put_status(
                    "failed",
                    error=LaunchError.__name__,
                    message=message,
                    exit_code=LaunchError.exit_code,
                )
        raise LaunchError(message) from problem


def find_lost_ranks(folder: Path) -> tuple[list[LastHeartbeat], list[LastHeartbeat]]:
    """Return the processes without a pulse, and those that ended with their own error or interruption.

    Waits for several pulses at most; for this host, the system knows immediately which processes exist.
    """

    def others() -> list[LastHeartbeat]:
        signs = []
        for sign in read_heartbeats(folder):
            if sign.rank != rank() and sign.rank < world_size():
                signs.append(sign)
        return signs

    first = {sign.rank: sign.pulse for sign in others()}
    end = time.monotonic() + SECONDS_FOR_AN_ANSWER
    while True:
        signs = others()
        silent = [
            sign for sign in signs if sign.ended is None and sign.pulse == first.get(sign.rank)
        ]
        dead = [sign for sign in silent if is_of_this_host(sign) and not is_alive(sign.pid)]
        if len(silent) == len(dead) or time.monotonic() > end:
            return silent, [sign for sign in signs if sign.ended]
        time.sleep(SECONDS_BETWEEN_LOOKS)


class GroupTimeouts(TrainerCallback):
    """Sets the timeout of all groups at the start of training, and after the first step, which creates some.

    DeepSpeed's groups wait 30 minutes over gloo and 10 with NCCL, regardless of the recipe.
    """

    def __init__(self) -> None:
        self.is_first_step = True

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if dist.is_initialized():
            set_group_timeouts(args.ddp_timeout_delta)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.is_first_step:
            self.is_first_step = False
            self.on_train_begin(args, state, control)
