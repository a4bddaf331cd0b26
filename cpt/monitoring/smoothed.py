"""The loss without its noise: an exponential moving average over the logs, which a resumed run goes on with
exactly."""

import math
from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

DECAY = 0.9  # what a log weighs beside the next one: the last ten have two thirds of the weight


class SmoothedLoss(TrainerCallback):
    """Adds `loss_smoothed` to each log of the training loss: the weighted mean of all logged losses, each weighing 0.9
    of the next one.

    The Trainer's own history has them all, and each checkpoint keeps it, so a run that goes on, or back, begins where
    it was.
    """

    def __init__(self) -> None:
        self.total, self.weight = 0.0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take in what was logged before."""
        self.total, self.weight = 0.0, 0.0
        self.take_in(float(line["loss"]) for line in state.log_history if "loss" in line)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The same where the run went back to a checkpoint on its way: then the Trainer's loop begins anew."""
        self.on_train_begin(args, state, control)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the mean so far."""
        logs = kwargs["logs"]
        if "loss" in logs:
            self.take_in([logs["loss"]])
            if self.weight:
                logs["loss_smoothed"] = self.total / self.weight

    def take_in(self, losses: Iterable[float]) -> None:
        """One after the other; what is not finite counts for nothing."""
        for loss in losses:
            if math.isfinite(loss):
                self.total, self.weight = DECAY * self.total + loss, DECAY * self.weight + 1
