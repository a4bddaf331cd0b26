"""Log how many tokens came from each source so far, and which share of all that is: arithmetic on the step's number,
nothing is counted."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.mixture import RowsOfSteps
from cpt.data.prepared import PreparedData


class RealisedShares(TrainerCallback):
    """Adds `share_<source>` and `tokens_<source>` to each log of the training loss; it must stand before the callbacks
    that read them.

    Where each example is a row by itself, shares are of examples, and nobody knows the tokens.

    Args:
        rows: which of them a step reads.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps) -> None:
        self.data, self.rows = data, rows

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add them; of a single source there is nothing to tell."""
        logs = kwargs["logs"]
        if "loss" in logs and state.global_step and len(self.data.sources) > 1:
            tokens = self.data.tokens(self.rows.first(state.global_step))
            total = sum(tokens.values())
            logs.update({f"share_{name}": round(number / total, 6) for name, number in tokens.items()})
            if not self.data.windowed[0].layout.is_one_a_row:
                logs.update({f"tokens_{name}": round(number) for name, number in tokens.items()})
