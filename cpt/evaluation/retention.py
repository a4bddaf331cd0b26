"""Follow what a model gains and what it forgets while it trains, and stop before it forgets too much."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.ranks import is_main_process
from cpt.runs.folder import EVALUATED, METRICS, Content, is_bits_per_byte, read_lines, set_name
from cpt.runs.record import Run

log = logging.getLogger("cpt")


@dataclass(frozen=True)
class Point:
    """One evaluation of a run."""

    step: int
    tokens: int
    bits_per_byte: dict[str, float]
    """By held-out set."""


class StopWhenForgetting(TrainerCallback):
    """End the training when an evaluation finds that a general set has become worse than the recipe allows.

    Args:
        run: its metrics.jsonl has the values before the first step, for a resumed run.
        allowed: held-out set -> the largest rise of its bits per byte, as a share of the value before the first step;
            None allows any.
    """

    def __init__(self, run: Run, allowed: Mapping[str, float | None]) -> None:
        self.run = run
        self.allowed = {name: rise for name, rise in allowed.items() if rise is not None}
        self.before: dict[str, float] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        course = read_course(self.run.folder / METRICS) if state.global_step else []
        self.before = dict(course[0].bits_per_byte) if course and course[0].step == 0 else {}

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
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
    """Bits per byte by held-out set, out of what the Trainer logs."""
    return {set_name(key): float(value) for key, value in metrics.items() if is_bits_per_byte(key)}


def read_evaluations(metrics: Path) -> list[Content]:
    """The lines of a metrics.jsonl with something that was evaluated."""
    lines = [line for line in read_lines(metrics) if {"step", "tokens"} <= line.keys()]
    return [line for line in lines if any(key.startswith(EVALUATED) for key in line)]


def read_course(metrics: Path) -> list[Point]:
    return course_of(read_evaluations(metrics))


def course_of(evaluations: Sequence[Content]) -> list[Point]:
    """The evaluations of held-out text, in order; the last one of a step that was evaluated twice."""
    points: dict[int, Point] = {}
    for line in evaluations:
        if figures := bits_per_byte_of(line):
            points[line["step"]] = Point(line["step"], line["tokens"], figures)
    return [points[step] for step in sorted(points)]
