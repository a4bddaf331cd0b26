"""Measure the time spent in training steps alone, and how much of it went by waiting for data."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.loader import CPTDataLoader


class TrainingClock(TrainerCallback):
    """Adds `tokens_per_second` and `data_wait` (share of the time) to each log of the training loss.

    Evaluation and saving stand still on this clock. It must stand before the callbacks that read its figures.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.since = 0.0
        self.seconds = 0.0
        self.steps = 0
        self.waited = 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock."""
        self.since = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step and its time."""
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now
        self.steps += 1
        # The Trainer counts epochs from where this process began; ours is the share of the whole run.
        state.epoch = state.global_step / state.max_steps

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Turn what was counted since the last log into a speed."""
        logs = kwargs["logs"]
        if "loss" in logs and self.steps:
            now = time.perf_counter()
            self.seconds += now - self.since
            logs["tokens_per_second"] = round(self.steps * self.tokens_per_step / self.seconds, 1)
            logs["data_wait"] = round(self.waited_since_last_log(kwargs["train_dataloader"]) / self.seconds, 5)
            self.seconds, self.steps = 0.0, 0
        self.since = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave out the time of the evaluation."""
        self.since = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave out the time of the save."""
        self.since = time.perf_counter()

    def waited_since_last_log(self, loader: object) -> float:
        """Seconds; a user's own loader that does not count them has waited 0."""
        before, self.waited = self.waited, loader.waited_seconds if isinstance(loader, CPTDataLoader) else 0.0
        return self.waited - before
