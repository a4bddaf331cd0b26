"""What the run's folder tells while it runs: metrics.jsonl, a line for each log, and the step in status.json."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.runs.record import Run


class MetricsFile(TrainerCallback):
    """Appends to `path`; on a resume the lines after the checkpoint's step are taken out first, so no step stands there twice."""

    def __init__(self, path: Path, tokens_per_step: int) -> None:
        self.path = path
        self.tokens_per_step = tokens_per_step

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget what the checkpoint does not know."""
        if state.is_world_process_zero:
            keep_lines_until(self.path, state.global_step)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """One line for each log."""
        if state.is_world_process_zero:
            line = {"step": state.global_step, "tokens": state.global_step * self.tokens_per_step, **kwargs["logs"]}
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


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
        self.run.write_status("running", step=state.global_step, steps=state.max_steps)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At each save."""
        self.run.write_status("running", step=state.global_step, steps=state.max_steps, checkpoint=f"checkpoint-{state.global_step}")
