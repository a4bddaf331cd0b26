"""Follow what a model gains and what it forgets while it trains, and stop before it forgets too much."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.ranks import is_main_process
from cpt.runs.folder import METRICS, read_lines, read_objects
from cpt.runs.record import Run

log = logging.getLogger("cpt")
FIGURE, SUFFIX = "eval_", "_bits_per_byte"


@dataclass(frozen=True)
class Point:
    """One evaluation of a run."""

    step: int
    tokens: int
    bits_per_byte: dict[str, float]
    """By held-out set."""


class StopWhenForgetting(TrainerCallback):
    """Ends the training at the evaluation at which a general set has become worse by more than the recipe allows.

    Args:
        run: whose metrics.jsonl holds the values of before the first step, also for a run that goes on from a
            checkpoint.
        allowed: held-out set -> the largest rise of its bits per byte, as a share of the value before the first step;
            None is never enough.
    """

    def __init__(self, run: Run, allowed: Mapping[str, float | None]) -> None:
        self.run = run
        self.allowed = {name: rise for name, rise in allowed.items() if rise is not None}
        self.before: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the first values of a run that was begun before."""
        course = read_course(self.run.folder / METRICS) if state.global_step else []
        self.before = dict(course[0].bits_per_byte) if course and course[0].step == 0 else {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compare with the values before the first step."""
        now = bits_per_byte_of(kwargs["metrics"])
        if not self.before:
            self.before = now
            return
        for name, rise in self.allowed.items():
            if name in now and now[name] > self.before[name] * (1 + rise):
                control.should_training_stop = True
                reason = (
                    f"stopped at step {state.global_step}: bits per byte of `{name}` rose from {self.before[name]:.4f}"
                    f" to {now[name]:.4f} ({now[name] / self.before[name] - 1:+.1%}), more than the {rise:.1%} that"
                    " `evaluation.retain` allows"
                )
                if is_main_process():
                    log.warning(
                        f"{reason}. The learning rate had not come down yet. To go further: more replay (general"
                        " sources weigh more), a lower `optimizer.learning_rate`, or LoRA."
                    )
                self.run.write_status("running", step=state.global_step, steps=state.max_steps, stopped=reason)


def bits_per_byte_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """By held-out set, out of what the Trainer logs."""
    return {
        key.removeprefix(FIGURE).removesuffix(SUFFIX): float(value)
        for key, value in metrics.items()
        if key.startswith(FIGURE) and key.endswith(SUFFIX)
    }


def read_course(metrics: Path) -> list[Point]:
    """Every evaluation in a metrics.jsonl, in order; of a step that was evaluated twice the last one."""
    points: dict[int, Point] = {}
    for logged in read_lines(metrics):
        figures = bits_per_byte_of(logged)
        if figures and {"step", "tokens"} <= logged.keys():
            points[logged["step"]] = Point(logged["step"], logged["tokens"], figures)
    return [points[step] for step in sorted(points)]


def last_tokens(metrics: Path) -> int:
    """Tokens that were read at the last evaluation; 0 where there was none."""
    logs = read_objects(metrics, [])
    return max(
        (int(logged.get("tokens", 0)) for logged in logs if any(key.startswith(FIGURE) for key in logged)), default=0
    )


def evaluated_steps(metrics: Path) -> set[int]:
    """Steps after which something held out was measured, whatever its figures are."""
    logs = read_objects(metrics, [])
    return {logged["step"] for logged in logs if "step" in logged and any(key.startswith(FIGURE) for key in logged)}


def average(point: Point, names: Sequence[str]) -> float:
    """Bits per byte of several sets together, each as important as the others."""
    return sum(point.bits_per_byte[name] for name in names) / len(names)
