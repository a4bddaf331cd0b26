"""What the run costs: its time, by the price of its GPUs."""

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.runs.folder import read_metrics

COST, TO_GO = "cost", "cost_to_go"


class Cost(TrainerCallback):
    """Adds `cost` so far and `cost_to_go` to each log of the training loss, in dollars or whatever the price is in.

    It counts from the first step of each start to its last log, evaluations and saves included; steps that were lost
    were paid for.

    Args:
        run: the run's folder, whose metrics.jsonl tells what earlier starts came to.
        dollars_per_gpu_hour: of one GPU; without any, of one process.
    """

    # It must stand behind the callback that adds `seconds_to_go`, and before the one that cuts metrics.jsonl.
    def __init__(self, run: Path, *, dollars_per_gpu_hour: float) -> None:
        self.run, self.price = run, dollars_per_gpu_hour
        self.before, self.began = 0.0, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What earlier starts came to."""
        self.began = time.perf_counter()
        if state.global_step and state.is_world_process_zero:
            self.before = read_metrics(self.run, [COST]).last(COST) or 0.0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add what this one comes to."""
        logs = kwargs["logs"]
        if "loss" in logs:
            each_second = self.price * max(1, args.world_size * args.n_gpu) / 3600
            logs[COST] = round(self.before + each_second * (time.perf_counter() - self.began), 4)
            if "seconds_to_go" in logs:
                logs[TO_GO] = round(each_second * logs["seconds_to_go"], 4)
