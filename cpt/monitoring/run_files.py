"""What the run's folder tells while it runs: metrics.jsonl, a line for each log, and the step in status.json."""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.runs.events import write_waiting_events
from cpt.runs.record import Run
from cpt.runs.small_files import LinesFile, is_until, keep_lines_until

log = logging.getLogger("cpt")
NOTHING_KEPT = -1
SECONDS_BETWEEN_WRITES = 1.0  # of a status that only tells of another step


class MetricsFile(TrainerCallback):
    """Appends to `path`, later where the disk is full.

    On a resume the lines after the checkpoint's step are taken out first, so no step stands there twice.
    """

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.lines = LinesFile(path)
        self.to_cut_at: int | None = None
        """The step behind which lines must go before others come, where the disk did not let them yet."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Forget what the checkpoint does not know; a fresh start keeps no lines."""
        if state.is_world_process_zero:
            self.to_cut_at = state.global_step or NOTHING_KEPT
            self.lines.waiting = [line for line in self.lines.waiting if is_until(line, self.to_cut_at)]
            self.cut()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The same where the run went back to a checkpoint on its way: then the Trainer's loop begins anew."""
        if state.global_step:
            self.on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One line for each log."""
        if state.is_world_process_zero:
            line = json.dumps(
                {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step, **kwargs["logs"]}
            )
            if self.to_cut_at is None or self.cut():
                self.lines.add(line)
            else:
                self.lines.waiting.append(f"{line}\n")

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What had to wait is tried again."""
        if self.to_cut_at is None or self.cut():
            self.lines.write_waiting()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The last chance."""
        self.on_step_end(args, state, control)

    def cut(self) -> bool:
        """Take the lines out; whether that could be done."""
        assert self.to_cut_at is not None
        try:
            keep_lines_until(self.path, self.to_cut_at)
        except OSError as problem:
            log.warning("%s cannot be changed: %s. Its lines wait for the next one.", self.path, problem.strerror)
            return False
        self.to_cut_at = None
        return True


class StatusFile(TrainerCallback):
    """Writes the status at logs and at each save, and events of this process that had to wait for room."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.written = -math.inf

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At a log, once in a second at most."""
        if time.monotonic() - self.written >= SECONDS_BETWEEN_WRITES:
            self.on_save(args, state, control)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Events are rare, and none waits as a rule."""
        write_waiting_events(self.run.folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At each save, which may have failed, or still be under way in the background."""
        self.written = time.monotonic()
        self.run.write_status(
            "running", step=state.global_step, steps=state.max_steps, **newest_checkpoint(self.run.folder)
        )


def newest_checkpoint(folder: Path) -> dict[str, str]:
    """The `checkpoint` of the status: the newest that is published."""
    steps = [
        int(path.name.rpartition("-")[2])
        for path in folder.glob("checkpoint-*")
        if path.name.rpartition("-")[2].isdigit()
    ]
    return {"checkpoint": f"checkpoint-{max(steps)}"} if steps else {}
