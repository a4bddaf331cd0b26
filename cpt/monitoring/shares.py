"""Log which share of the tokens so far came from each source: arithmetic on the step's number, nothing is counted on the way."""

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.prepared import PreparedData


class RealisedShares(TrainerCallback):
    """Adds `share_<source>` to each log of the training loss; it must stand before the callbacks that read it.

    Args:
        rows_per_step: rows in one optimizer step, over all processes.
    """

    def __init__(self, data: PreparedData, rows_per_step: int) -> None:
        self.data, self.rows_per_step = data, rows_per_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the shares; of a single source there is nothing to tell."""
        logs = kwargs["logs"]
        if "loss" in logs and state.global_step and len(self.data.sources) > 1:
            shares = self.data.shares(state.global_step * self.rows_per_step)
            logs.update({f"share_{name}": round(share, 6) for name, share in shares.items()})
