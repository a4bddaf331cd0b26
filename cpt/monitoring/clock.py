"""Measure the time spent in training steps alone, how long one takes, and how much of it went by waiting for data."""

import logging
import statistics
import time
from collections import deque
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.loader import CPTDataLoader

log = logging.getLogger("cpt")
STEPS_LOOKED_AT = 100
BEARABLE_WAIT = 0.01  # share of the time of a step


class TrainingClock(TrainerCallback):
    """Adds `tokens`, `tokens_per_second`, `data_wait` (share of the time) and the length of a step to each log of the
    training loss.

    `step_seconds_p50` and `step_seconds_p95` are of the last 100 steps. Evaluation and saving stand still on this
    clock. It must stand before the callbacks that read its figures. It warns once where the last steps waited for data
    more than they should; the run's first step, which has to, is not among them.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.since = 0.0
        self.seconds = 0.0
        self.steps = 0
        self.waited = 0.0
        self.last_steps: deque[tuple[float, float]] = deque(maxlen=STEPS_LOOKED_AT)
        """Seconds, and seconds waited by then since the run began."""
        self.has_warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self.since = time.perf_counter()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step and its time."""
        now = time.perf_counter()
        self.seconds += now - self.since
        self.last_steps.append((now - self.since, waited_by(kwargs.get("train_dataloader"))))
        self.since = now
        self.steps += 1
        if not self.has_warned and state.global_step % STEPS_LOOKED_AT == 0:
            self.warn_of_waiting()
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
            logs["tokens"] = state.global_step * self.tokens_per_step
            logs["step_seconds_p50"], logs["step_seconds_p95"] = middle_and_slow(
                [seconds for seconds, _ in self.last_steps]
            )
            self.seconds, self.steps = 0.0, 0
        self.since = time.perf_counter()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave out the time of the evaluation."""
        self.since = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave out the time of the save."""
        self.since = time.perf_counter()

    def waited_since_last_log(self, loader: object) -> float:
        """Seconds."""
        before, self.waited = self.waited, waited_by(loader)
        return self.waited - before

    def warn_of_waiting(self) -> None:
        """Say once that the data come too late, and what helps."""
        if len(self.last_steps) < STEPS_LOOKED_AT:
            return
        seconds = sum(seconds for seconds, _ in self.last_steps) - self.last_steps[0][0]
        share = (self.last_steps[-1][1] - self.last_steps[0][1]) / seconds
        if share > BEARABLE_WAIT:
            self.has_warned = True
            log.warning(
                f"the model waited for data {share:.1%} of the last {STEPS_LOOKED_AT} steps. If documents are still"
                " being tokenised: `cpt prepare RECIPE` does it beforehand. If the disk is slow: set CPT_CACHE to a"
                " folder on a local one. If your own rows or collate_fn take long: `training.dataloader_num_workers:"
                " 2` makes micro-batches in processes."
            )


def middle_and_slow(seconds: list[float]) -> tuple[float, float]:
    """The median, and what 95 % of them stay below."""
    twentieths = statistics.quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds * 19
    return round(twentieths[9], 6), round(twentieths[18], 6)


def waited_by(loader: object) -> float:
    """Seconds since the loader began; a user's own loader that does not count them has waited 0."""
    return loader.waited_seconds if isinstance(loader, CPTDataLoader) else 0.0
