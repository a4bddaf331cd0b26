"""Decide which steps the optimizer skips, and what follows a skipped one."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from cpt.data.rows.mixture import RowRange, RowsOfSteps
from cpt.distributed import main_process_decides
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.schema import Recipe
from cpt.training.loss_guard import (
    SkipBudget,
    Spike,
    SpikeDetector,
    StepVerdict,
    find_handler,
)

SAFETY = "safety.json"


@dataclass(frozen=True)
class Event:
    """A line of the run's events."""

    kind: str
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The action after a step. The guard only decides; the trainer acts."""

    action: Literal["continue", "skip", "roll_back", "abort"] = "continue"
    events: tuple[Event, ...] = ()
    reason: str = ""
    """Of a roll-back or an abort."""
    step: int = 0
    """The last skipped step."""
    first_step: int = 0
    """The first of the skipped steps that led to a roll-back."""
    left_out: tuple[RowRange, ...] = ()
    """Rows that a roll-back leaves out."""


class StepGuard:
    """Decides by each step's loss and gradient norm; a part of the run whose state is in checkpoints.

    A skipped step loses its rows. After too many, the run goes back to the last good checkpoint before them, and
    leaves out their rows.

    Args:
        rows: of each step; it also holds what is left out.
        folder: of the run, for the recipe's handler.
        highest_loss: a step with a higher one is always skipped.
    """

    file = SAFETY

    def __init__(
        self,
        recipe: Recipe,
        rows: RowsOfSteps,
        folder: Path,
        *,
        device: torch.device,
        tokens_per_step: int,
        highest_loss: float,
        fp16: bool,
    ) -> None:
        self.rows = rows
        self.folder = folder
        self.fp16 = fp16
        self.detector: SpikeDetector | None = None
        self.budget = SkipBudget(rows, 0, 0)  # unused without a detector
        section = recipe.safety.loss_guard
        if section is not None:
            self.detector = SpikeDetector(section, device, highest_loss)
            self.budget = SkipBudget(rows, self.detector.window, self.detector.skips)
        on_spike = recipe.safety.on_spike
        self.handler = None if on_spike is None else find_handler(on_spike)
        self.handler_name = "" if on_spike is None else on_spike.name
        self.new_data_from = set[int]()  # steps at which a phase of the data begins
        for phase in phases_in_tokens(recipe).phases[:-1]:
            if phase.until is not None:
                self.new_data_from.add(phase.until // tokens_per_step + 1)
        self.skipped_since_log: list[StepVerdict] = []

    # --- what a checkpoint stores ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """With it a resumed run makes the same decisions; all verdicts must have been read."""
        state: dict[str, Any] = {"format": 1, "left_out": self.rows.left_out}
        if self.detector is not None:
            state |= {"guard": self.detector.state(), "budget": self.budget.state()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows.left_out = [(first, end) for first, end in state_dict.get("left_out", [])]
        if self.detector is not None and "guard" in state_dict:
            self.detector.restore(state_dict["guard"])
            self.budget.restore(state_dict["budget"])

    # --- on the device -----------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        """Forget the level of the loss where another phase's data begin."""
        if self.detector is not None and step in self.new_data_from:
            self.detector.forget()

    # --- on the host -------------------------------------------------------------------------------------------------

    def decisions(self, *, unread: int = 0) -> Iterator[Decision]:
        """Yield what follows each step that the host has not seen yet, except for the last `unread`.

        The decisions are equal on all processes, which must read as many.
        """
        if self.detector is None:
            return
        for verdict in self.detector.read(unread=unread):
            yield self.decide(verdict)

    def decide(self, verdict: StepVerdict) -> Decision:
        if self.fp16 and math.isfinite(verdict.loss) and not math.isfinite(verdict.gradient_norm):
            return Decision()  # the scaler adjusts its scale
        skipped = self.budget.note(verdict)
        if skipped is None:
            return Decision()
        self.skipped_since_log.append(verdict)
        first, end = skipped.rows
        event = Event(
            kind="spike_skipped" if verdict.is_finite else "nan_skipped",
            message=f"Step {verdict.step} was skipped: {verdict.complaint()}. Its rows are {first:,} to {end - 1:,}.",
            details={
                "step": verdict.step,
                "rows": [first, end],
                "loss": str(verdict.loss),
                "gradient_norm": str(verdict.gradient_norm),
            },
        )
        action = self.action_after(verdict)
        if action == "roll_back":
            return self.decide_on_roll_back(verdict, event)
        reason = ""
        if action == "abort":
            reason = (
                f"step {verdict.step} was skipped: {verdict.complaint()}. `safety.on_spike: {self.handler_name}` ends"
                " the run."
            )
        return Decision(action, (event,), reason, step=verdict.step)

    def action_after(self, verdict: StepVerdict) -> Literal["skip", "roll_back", "abort"]:
        """By the recipe's handler, else by the budget of skipped steps."""
        handler = self.handler
        action: Any = None
        if handler is not None:
            spike = Spike(
                step=verdict.step,
                loss=verdict.loss,
                gradient_norm=verdict.gradient_norm,
                recent=len(self.budget.recent),
                rollbacks=self.budget.rollbacks,
                run_folder=self.folder,
            )
            action = main_process_decides(lambda: handler(spike))
        if action is None:
            action = "roll_back" if self.budget.is_exhausted else "skip"
        return action  # type: ignore[no-any-return]

    def decide_on_roll_back(self, verdict: StepVerdict, event: Event) -> Decision:
        """Roll back, or abort after the last allowed roll-back."""
        assert self.detector is not None, "only a detector skips steps"
        budget = self.budget
        max_rollbacks = self.detector.rollbacks
        steps = ", ".join(str(skipped.step) for skipped in budget.recent)
        if budget.rollbacks >= max_rollbacks:
            reason = (
                f"the training diverged: steps {steps} were skipped, after {budget.rollbacks} roll-back(s)"
                f" ({budget.total} skipped steps in all; events.jsonl has their rows). Lower"
                " `optimizer.learning_rate`, check the data of these rows, or raise `safety.loss_guard.skips`,"
                " `rollbacks`."
            )
            return Decision("abort", (event,), reason, step=verdict.step)
        bad = budget.roll_back()
        return Decision(
            "roll_back",
            (event,),
            reason=(
                f"{len(bad)} of the last {budget.window} steps were skipped ({steps}), roll-back"
                f" {budget.rollbacks} of {max_rollbacks}"
            ),
            step=verdict.step,
            first_step=bad[0].step,
            left_out=tuple(skipped.rows for skipped in bad),
        )
