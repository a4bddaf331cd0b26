"""Log which share of the tokens so far came from each source: arithmetic on the step's number, nothing is counted on the way."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.left_out import RowsOfSteps
from cpt.data.prepared import PreparedData


class RealisedShares(TrainerCallback):
    """Adds `share_<source>` to each log of the training loss; it must stand before the callbacks that read it.

    Args:
        rows: which of them a step reads.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps) -> None:
        self.data, self.rows = data, rows

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the shares; of a single source there is nothing to tell."""
        logs = kwargs["logs"]
        if "loss" in logs and state.global_step and len(self.data.sources) > 1:
            shares = self.data.shares(self.rows.first(state.global_step))
            logs.update({f"share_{name}": round(share, 6) for name, share in shares.items()})
