"""When the run will be through: the time that its steps took so far, evaluations and saves included, for those that
are left."""

import time
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class TimeToGo(TrainerCallback):
    """Adds `seconds_to_go` to each log of the training loss; the first step, which warms up, says nothing of the
    others."""

    def __init__(self) -> None:
        self.began, self.steps = 0.0, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """This process has made none yet."""
        self.steps = 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count those that are made, also those that the run goes back behind."""
        if not self.steps:
            self.began = time.perf_counter()
        self.steps += 1

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add what is left."""
        if "loss" in kwargs["logs"] and self.steps > 1:
            of_one = (time.perf_counter() - self.began) / (self.steps - 1)
            kwargs["logs"]["seconds_to_go"] = round(of_one * (state.max_steps - state.global_step), 1)
