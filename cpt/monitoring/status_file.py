"""Keep the step in the run's status.json, so that a script sees how far the run is."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.runs.record import Run


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
