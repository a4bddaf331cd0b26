"""Write metrics.jsonl, a line for each log, and the step in status.json, while the run trains."""

import json
import logging
import math
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.files import LinesFile
from cpt.runs.events import write_waiting_events
from cpt.runs.folder import is_until, keep_lines_until
from cpt.runs.record import Run

log = logging.getLogger("cpt")
NO_LINE = -1
SECONDS_BETWEEN_WRITES = 1.0  # of a status that only has another step


class MetricsFile(TrainerCallback):
    """Appends each log to a file; if the disk is full, later.

    A start first removes the lines after its checkpoint's step, so that no step is in the file twice.
    """

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.lines = LinesFile(path)
        self.cut_at: int | None = None
        """The step after which lines must be removed before others are written, until the disk allows it."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Remove lines that the checkpoint does not know; a fresh start keeps none."""
        # transformers takes the intervals of a resumed run from trainer_state.json; the recipe may have new ones.
        state.compute_steps(args, state.max_steps)
        if state.is_world_process_zero:
            self.cut_at = state.global_step or NO_LINE
            self.lines.waiting = [line for line in self.lines.waiting if is_until(line, self.cut_at)]
            self.cut()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            tokens = state.global_step * self.tokens_per_step
            line = json.dumps({"step": state.global_step, "tokens": tokens, **kwargs["logs"]})
            if self.cut():
                self.lines.add(line)
            else:
                self.lines.waiting.append(f"{line}\n")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.cut():
            self.lines.write_waiting()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.on_step_end(args, state, control)

    def cut(self) -> bool:
        """Remove the lines, if any must go; whether others can be written now."""
        if self.cut_at is not None:
            try:
                keep_lines_until(self.path, self.cut_at)
            except OSError as problem:
                log.warning("%s cannot be changed: %s. New lines wait.", self.path, problem.strerror)
                return False
            self.cut_at = None
        return True


class StatusFile(TrainerCallback):
    """Writes the status at logs and saves, and events of this process that a full disk did not take."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.written = -math.inf

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if time.monotonic() - self.written >= SECONDS_BETWEEN_WRITES:
            self.on_save(args, state, control)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        write_waiting_events(self.run.folder)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The save may have failed, or still run in the background."""
        self.written = time.monotonic()
        steps = [path.name.removeprefix("checkpoint-") for path in self.run.folder.glob("checkpoint-*")]
        newest = max((int(step) for step in steps if step.isdigit()), default=None)
        checkpoint = {} if newest is None else {"checkpoint": f"checkpoint-{newest}"}
        self.run.write_status("running", step=state.global_step, steps=state.max_steps, **checkpoint)
