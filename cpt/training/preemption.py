"""Stop a run on a signal: at the end of a step, after a save, on all processes together."""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.distributed import same_command, world_size
from cpt.errors import Interrupted
from cpt.hf_internals import exit_now
from cpt.interrupts import SIGNALS, EndAtOnce, replaceable_handlers

SECONDS_BETWEEN_AGREEMENTS = 0.1
MOST_CALLS_BETWEEN = 50
SECONDS_BETWEEN_LOOKS = 1.0  # checks of the launcher
SECONDS_OF_ONE_INTERRUPT = 1.0  # torchrun forwards signals that its processes already received
CODE_OF_SECOND_INTERRUPT = 130


@dataclass
class Pace:
    """Decides when processes agree next: after 0.1 s, counted in calls, so that all processes count the same."""

    calls_between: int = 1
    calls: int = 0  # since the last agreement
    asked_at: float = 0.0


class Preemption(TrainerCallback):
    """Handles SIGTERM, SIGINT, SIGUSR1 and SIGHUP in its context; as a callback it stops the training after a save.

    A signal to one process is enough. All processes agree on it, over gloo and not over the GPUs, at the end of a step
    or after an evaluation batch; the next start repeats that evaluation. Before and after training there is nothing to
    save: a command ends immediately, and elsewhere Interrupted is raised, which libraries may catch or report as an
    error of theirs. A second SIGINT, at least a second later, ends the process immediately. A lost launcher counts as
    a signal too: torchrun leaves its processes running when SIGUSR1 kills it. A SIGHUP that was ignored from the
    start (nohup) stays ignored.

    A thread reads the signals from a pipe: Python's own handlers wait for the main thread, which may hang in a call.
    """

    def __init__(self) -> None:
        self.record_end: Callable[[Interrupted], None] = lambda problem: None
        self.received: int = 0  # number of the first signal that this process got
        self.stopped_by: str | None = None  # the signal that stopped the training on all processes
        self.is_training = False
        self.interrupted_at: float | None = None
        self.group: dist.ProcessGroup | None = None
        self.steps = Pace()
        self.batches = Pace()
        self.previous: dict[int, Any] = {}

    def record_with(self, record_end: Callable[[Interrupted], None]) -> None:
        """Call the function before a command ends immediately."""
        self.record_end = record_end

    # --- the context -------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Preemption":
        """Install handlers, which only works in the main thread (a notebook's server may use another)."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self.reading, self.writing = os.pipe()
        os.set_blocking(self.writing, False)
        self.previous_descriptor = signal.set_wakeup_fd(self.writing, warn_on_full_buffer=False)
        self.previous = replaceable_handlers()
        for number in self.previous:
            signal.signal(number, self.at_signal)
        os.register_at_fork(after_in_child=self.leave_child_alone)
        self.is_watching = True
        self.launcher = os.getppid() if "RANK" in os.environ else None
        self.watcher = threading.Thread(target=self.watch, name="cpt-signals", daemon=True)
        self.watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.previous:
            return
        self.is_watching = False
        os.write(self.writing, b"\0")
        self.watcher.join()
        signal.set_wakeup_fd(self.previous_descriptor)
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        self.previous = {}
        os.close(self.reading)
        os.close(self.writing)

    def at_signal(self, number: int, frame: FrameType | None) -> None:
        """Called by Python in the main thread; the watching thread records the signal."""
        if self.is_training:
            self.received = self.received or number
        if self.is_training or self.stopped_by is not None:
            return
        problem = Interrupted(
            f"{signal.Signals(number).name} arrived outside of training. {same_command()} continues."
        )
        command = self.previous[number]
        if isinstance(command, EndAtOnce):
            self.record_end(problem)
            command(number, frame)
        raise problem

    def leave_child_alone(self) -> None:
        """Restore the default in forked workers: SIGTERM ends them; on Ctrl-C the main process ends them."""
        if self.previous:
            signal.set_wakeup_fd(-1)
            for number in self.previous:
                signal.signal(
                    number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN
                )

    def watch(self) -> None:
        while self.is_watching:
            readable, _, _ = select.select([self.reading], [], [], SECONDS_BETWEEN_LOOKS)
            if readable:
                for number in os.read(self.reading, 64):
                    self.note(number)
            if self.launcher is not None and os.getppid() != self.launcher:
                self.launcher = None
                self.note(signal.SIGHUP)

    def note(self, number: int) -> None:
        if number not in SIGNALS:
            return
        self.received = self.received or number
        if number == signal.SIGINT:
            seconds_now = time.monotonic()
            if (
                self.interrupted_at is not None
                and seconds_now - self.interrupted_at > SECONDS_OF_ONE_INTERRUPT
            ):
                exit_now(CODE_OF_SECOND_INTERRUPT)
            self.interrupted_at = self.interrupted_at or seconds_now

    # --- the callback ------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.is_training = True
        if world_size() > 1 and self.group is None:
            self.group = dist.new_group(backend="gloo")
            dist.barrier(group=self.group)  # connects the processes while the launcher exists
        self.steps.asked_at = self.batches.asked_at = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if self.is_told_to_stop(self.steps):
            control.should_save = True
            control.should_evaluate = False
            control.should_training_stop = True

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Raise Interrupted on all processes, after the same batch, if any process got a signal."""
        if self.is_training and self.stopped_by is None:
            self.is_told_to_stop(self.batches)
        if self.stopped_by is not None:
            raise Interrupted(f"stopped by {self.stopped_by} in an evaluation")

    def is_told_to_stop(self, pace: Pace) -> bool:
        """Whether any process got a signal; equal on all processes."""
        pace.calls += 1
        if pace.calls < pace.calls_between:
            return False
        number = self.received
        if self.group is not None:
            seconds_now = time.perf_counter()
            slowest = torch.tensor([float(number), (seconds_now - pace.asked_at) / pace.calls])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.group)
            largest, seconds = slowest.tolist()
            calls = int(SECONDS_BETWEEN_AGREEMENTS / max(seconds, 1e-9))
            pace.calls_between = max(1, min(MOST_CALLS_BETWEEN, calls))
            pace.asked_at = seconds_now
            pace.calls = 0
            number = int(largest)
        if number:
            self.stopped_by = signal.Signals(number).name
        return bool(number)

    def end_training(self, checkpoint: str | None) -> None:
        """Call it when the last save is written. Raises Interrupted if a signal came; `checkpoint` is the newest."""
        self.is_training = False
        if self.received and self.stopped_by is None:
            self.stopped_by = signal.Signals(self.received).name
        if self.stopped_by is not None:
            saved = f"nothing is saved yet. {same_command()} starts from the beginning"
            if checkpoint:
                saved = f"{checkpoint} is saved. {same_command()} continues from it"
            raise Interrupted(f"stopped by {self.stopped_by}: {saved}.")
