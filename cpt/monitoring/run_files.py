"""What the run's folder tells while it runs: metrics.jsonl, a line for each log, and the step in status.json."""

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.runs.record import Run

log = logging.getLogger("cpt")


class MetricsFile(TrainerCallback):
    """Appends to `path`, later where the disk is full.

    On a resume the lines after the checkpoint's step are taken out first, so no step stands there twice.
    """

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step
        self.waiting: list[str] = []

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget what the checkpoint does not know."""
        if state.is_world_process_zero:
            keep_lines_until(self.path, state.global_step)

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The same where the run went back to a checkpoint on its way: then the Trainer's loop begins anew."""
        if state.global_step:
            self.on_train_begin(args, state, control, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One line for each log."""
        if state.is_world_process_zero:
            line = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step, **kwargs["logs"]}
            self.waiting.append(f"{json.dumps(line)}\n")
            try:
                append(self.path, "".join(self.waiting))
                self.waiting.clear()
            except OSError as problem:
                log.warning("%s cannot be written: %s. Its lines wait for the next one.", self.path, problem.strerror)


def append(path: Path, text: str) -> None:
    """All of the text or nothing of it."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        try:
            if file.write(text.encode()) < len(text.encode()):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            file.truncate(size)
            raise


def keep_lines_until(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file whose `step` is not after `step`; a fresh start keeps none."""
    if path.exists():
        lines = path.read_text().splitlines() if step else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        path.write_text("".join(f"{line}\n" for line in kept))


class StatusFile(TrainerCallback):
    """Writes the status at each log and each save."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At each log."""
        self.run.write_status("running", step=state.global_step, steps=state.max_steps, **newest_checkpoint(self.run.folder))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At each save, which may have failed, or still be under way in the background."""
        self.run.write_status("running", step=state.global_step, steps=state.max_steps, **newest_checkpoint(self.run.folder))


def newest_checkpoint(folder: Path) -> dict[str, str]:
    """The `checkpoint` of the status: the newest that is published."""
    steps = [int(path.name.rpartition("-")[2]) for path in folder.glob("checkpoint-*") if path.name.rpartition("-")[2].isdigit()]
    return {"checkpoint": f"checkpoint-{max(steps)}"} if steps else {}
