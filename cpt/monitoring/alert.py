"""Tell once where a figure crosses a bound, and again when it does so the next time."""

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.errors import RecipeError
from cpt.runs.events import record_event


class Alert(TrainerCallback):
    """Records an event `alert` where a figure stays above or below a bound.

    Args:
        run: the run's folder.
        figure: as metrics.jsonl calls it, `grad_norm` or `eval_general_loss`.
        above, below: what it may be at most, and at least; one of them or both.
        logs: for how many logs of it in a row.
    """

    def __init__(
        self, run: Path, *, figure: str, above: float | None = None, below: float | None = None, logs: int = 1
    ) -> None:
        if above is None and below is None:
            raise RecipeError(f"an alert on `{figure}` needs `above` or `below`.")
        if logs < 1:
            raise RecipeError(f"an alert after {logs} logs would come before there is a figure: `logs` is 1 or more.")
        self.run, self.figure, self.above, self.below, self.logs = run, figure, above, below, logs
        self.beyond = 0
        self.known: set[str] = set()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at the figure, where this log has it."""
        if not state.is_world_process_zero:
            return
        self.known |= kwargs["logs"].keys()
        value = kwargs["logs"].get(self.figure)
        if not isinstance(value, int | float):
            return
        bound = self.crossed(value)
        self.beyond = self.beyond + 1 if bound else 0
        if bound and self.beyond == self.logs:
            how_long = "" if self.logs == 1 else f", for {self.logs} logs now"
            message = f"Step {state.global_step}: {self.figure} is {value:.6g}, {bound}{how_long}."
            record_event(self.run, "alert", message, step=state.global_step, figure=self.figure, value=str(value))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A slip in the figure's name would else never show."""
        if state.is_world_process_zero and self.known and self.figure not in self.known:
            message = (
                f"The alert on {self.figure} never saw that figure. This run logged: {', '.join(sorted(self.known))}."
            )
            record_event(self.run, "alert_without_figure", message, step=state.global_step, figure=self.figure)

    def crossed(self, value: float) -> str:
        """The bound in words, empty within it; what is not a number is beyond any."""
        if self.above is not None and not value <= self.above:
            return f"above {self.above:g}"
        if self.below is not None and not value >= self.below:
            return f"below {self.below:g}"
        return ""
