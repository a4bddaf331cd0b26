"""Profile a few steps with torch.profiler: a trace, and a table of the most expensive operations."""

import logging
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import RecipeError
from cpt.runs.events import record_event
from cpt.runs.folder import PROFILE

log = logging.getLogger("cpt")
ROWS = 40
STEPS = 3


class StepProfile(TrainerCallback):
    """Profiles steps of the main process and writes `profile/steps-A-B.json.gz` and `steps-A-B.txt`.

    The step before them warms the profiler up. An event reports steps that were not profiled.

    Args:
        run: the run's folder.
        at_step: the first of three steps, counted from 1.
    """

    def __init__(self, run: Path, at_step: int) -> None:
        self.run, self.first, self.last = run, at_step, at_step + STEPS - 1
        self.file = run / PROFILE / f"steps-{self.first}-{self.last}.txt"
        self.profiler: profile | None = None

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Begin with the step before the first one, or with the run's first."""
        if state.is_world_process_zero and self.profiler is None and state.global_step + 1 == max(1, self.first - 1):
            self.profiler = profile(
                activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available(),
                schedule=torch.profiler.schedule(wait=0, warmup=min(1, self.first - 1), active=STEPS, repeat=1),
            )
            self.profiler.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.profiler is None:
            return
        if state.global_step < self.last:
            self.profiler.step()
            return
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        trace = self.file.with_suffix(".json.gz")
        order = f"self_{args.device.type}_time_total"
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            table = profiler.key_averages().table(sort_by=order, row_limit=ROWS, max_name_column_width=80)
            self.file.write_text(table)
        except (OSError, RuntimeError) as problem:  # a full disk
            log.warning("The profile cannot be written: %s.", problem)
            return
        self.report("profile", f"profiled: {trace} (open it in ui.perfetto.dev) and {self.file.name}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The run may resume after these steps, or end before the last of them."""
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
        if state.is_world_process_zero and not self.file.exists():
            self.report("profile_left_out", "not profiled: the run began after them or ended before")

    def report(self, kind: str, what: str) -> None:
        record_event(self.run, kind, f"Steps {self.first} to {self.last}: {what}.", step=self.first)


def check_profiled_steps(at_step: int | None, steps: int) -> None:
    """Refuse to profile steps that a run of so many steps does not have.

    Raises:
        RecipeError: with the key.
    """
    if at_step is not None and (last := at_step + STEPS - 1) > steps:
        raise RecipeError(f"`monitoring.profile`: the last profiled step is {last}, but the run has {steps}.")
