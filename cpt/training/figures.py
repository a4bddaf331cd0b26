"""Add figures of progress to each log: speed, time left, waiting for data, smoothed loss, shares, cost."""

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.build import PreparedData
from cpt.data.loader import CPTDataLoader
from cpt.data.mixture import RowsOfSteps
from cpt.runs.folder import read_metrics

log = logging.getLogger("cpt")
LAST_STEPS = 100
ACCEPTABLE_WAIT = 0.01  # share of the time of a step
DECAY = 0.9  # weight of a log relative to the next one: the last ten have two thirds of the weight
COST = "cost"


class TrainingClock(TrainerCallback):
    """Adds `tokens`, `tokens_per_second`, `data_wait`, `step_seconds_p50`, `step_seconds_p95` and `seconds_to_go`.

    Evaluation and saving do not count, except in `seconds_to_go`. It warns once if the last 100 steps waited for data.
    """

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.since = self.seconds = self.waited = self.first_step_ended = 0.0
        self.steps = self.steps_in_all = 0  # since the last log; of this process
        self.last_steps: deque[tuple[float, float]] = deque(maxlen=LAST_STEPS)
        """Seconds of each step, and seconds waited by then since the run began."""
        self.has_warned = False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.since, self.steps_in_all = time.perf_counter(), 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now = time.perf_counter()
        self.seconds += now - self.since
        self.last_steps.append((now - self.since, waited_by(kwargs.get("train_dataloader"))))
        self.since = now
        self.steps += 1
        if not self.steps_in_all:  # the first step warms up
            self.first_step_ended = now
        self.steps_in_all += 1
        if not self.has_warned and state.global_step % LAST_STEPS == 0:
            self.warn_of_waiting()
        # The Trainer counts epochs from where this process began; ours is the share of the whole run.
        state.epoch = state.global_step / state.max_steps

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs, now = kwargs["logs"], time.perf_counter()
        if "loss" in logs and self.steps:
            seconds = self.seconds + now - self.since
            before, self.waited = self.waited, waited_by(kwargs["train_dataloader"])
            logs["tokens_per_second"] = round(self.steps * self.tokens_per_step / seconds, 1)
            logs["data_wait"] = round((self.waited - before) / seconds, 5)
            logs["tokens"] = state.global_step * self.tokens_per_step
            logs["step_seconds_p50"], logs["step_seconds_p95"] = percentiles([one for one, _ in self.last_steps])
            self.seconds, self.steps = 0.0, 0
            if self.steps_in_all > 1:
                of_one = (now - self.first_step_ended) / (self.steps_in_all - 1)
                logs["seconds_to_go"] = round(of_one * (state.max_steps - state.global_step), 1)
        self.since = time.perf_counter()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Skip the time of an evaluation, and of a save."""
        self.since = time.perf_counter()

    on_save = on_evaluate

    def warn_of_waiting(self) -> None:
        if len(self.last_steps) < LAST_STEPS:
            return
        seconds = sum(seconds for seconds, _ in self.last_steps) - self.last_steps[0][0]
        share = (self.last_steps[-1][1] - self.last_steps[0][1]) / seconds
        if share > ACCEPTABLE_WAIT:
            self.has_warned = True
            log.warning(
                f"the model waited for data {share:.1%} of the last {LAST_STEPS} steps. If documents are still being"
                " tokenized: run `cpt prepare RECIPE` before. If the disk is slow: set CPT_CACHE to a local folder. If"
                " your own rows or collate_fn are slow: set `training.dataloader_num_workers: 2`."
            )


def percentiles(seconds: list[float]) -> tuple[float, float]:
    twentieths = statistics.quantiles(seconds, n=20, method="inclusive") if len(seconds) > 1 else seconds * 19
    return round(twentieths[9], 6), round(twentieths[18], 6)


def waited_by(loader: object) -> float:
    """Seconds since the loader began; 0 for a user's own loader, which does not count them."""
    return loader.waited_seconds if isinstance(loader, CPTDataLoader) else 0.0


class SmoothedLoss(TrainerCallback):
    """Adds `loss_smoothed`: an exponential moving average of all logged losses.

    It is computed from the Trainer's history, which each checkpoint has, so that a resumed run continues exactly.
    """

    def __init__(self) -> None:
        self.total, self.weight = 0.0, 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.total, self.weight = 0.0, 0.0
        self.add(float(line["loss"]) for line in state.log_history if "loss" in line)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            self.add([logs["loss"]])
            if self.weight:
                logs["loss_smoothed"] = self.total / self.weight

    def add(self, losses: Iterable[float]) -> None:
        """Add losses; those that are not finite do not count."""
        for loss in losses:
            if math.isfinite(loss):
                self.total, self.weight = DECAY * self.total + loss, DECAY * self.weight + 1


class RealisedShares(TrainerCallback):
    """Adds `share_<source>` and `tokens_<source>`: tokens so far, computed from the step's number.

    If each example is a row, shares are of examples, and there are no tokens.

    Args:
        rows: which of them a step reads.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps) -> None:
        self.data, self.rows = data, rows

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs and state.global_step and len(self.data.sources) > 1:
            tokens = self.data.tokens(self.rows.first(state.global_step))
            total = sum(tokens.values())
            logs.update({f"share_{name}": round(number / total, 6) for name, number in tokens.items()})
            if not self.data.windowed[0].layout.is_one_a_row:
                logs.update({f"tokens_{name}": round(number) for name, number in tokens.items()})


class Cost(TrainerCallback):
    """Adds `cost` so far and `cost_to_go`, in the currency of the price.

    It counts from the first step of each start to its last log, with evaluations, saves and lost steps.

    Args:
        run: the run's folder, whose metrics.jsonl has the cost of earlier starts.
        dollars_per_gpu_hour: per GPU; per process if there are no GPUs.
    """

    # It comes after TrainingClock, which adds `seconds_to_go`, and before MetricsFile, which cuts metrics.jsonl.
    def __init__(self, run: Path, *, dollars_per_gpu_hour: float) -> None:
        self.run, self.price = run, dollars_per_gpu_hour
        self.before, self.began = 0.0, 0.0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.began = time.perf_counter()
        if state.global_step and state.is_world_process_zero:
            self.before = read_metrics(self.run, [COST]).last(COST) or 0.0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "loss" in logs:
            per_second = self.price * max(1, args.world_size * args.n_gpu) / 3600
            logs[COST] = round(self.before + per_second * (time.perf_counter() - self.began), 4)
            if "seconds_to_go" in logs:
                logs["cost_to_go"] = round(per_second * logs["seconds_to_go"], 4)
