"""Keep the data with the run: windows are made ahead of it, and each checkpoint tells where it is in them."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.mixture import RowsOfSteps
from cpt.data.prepared import PreparedData
from cpt.data.rows.read_ahead import ReadAhead

FILE_NAME = "data_position.json"


class DataPosition(TrainerCallback):
    """Reads ahead while the run trains, and gives each checkpoint its `data_position.json`.

    Args:
        rows: which of them a step reads.
    """

    def __init__(self, data: PreparedData, rows: RowsOfSteps) -> None:
        self.data, self.rows = data, rows
        self.ahead: ReadAhead | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """On each machine one process begins to make what comes next."""
        self.began_at = state.global_step
        if args.local_process_index == 0:
            self.ahead = self.data.read_ahead(self.rows.first(state.global_step))
            if self.ahead is not None:
                self.ahead.start()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The same anew where the run went back to a checkpoint on its way: then the Trainer's loop begins anew."""
        if state.global_step != self.began_at:
            self.on_train_end(args, state, control)
            self.on_train_begin(args, state, control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Nothing more is needed."""
        if self.ahead is not None:
            self.ahead.stop()

    def texts(self, first_row: int) -> dict[str, str]:
        """What a checkpoint keeps of the data, by the file's name.

        Args:
            first_row: the next row that the run will train on.
        """
        return {FILE_NAME: json.dumps(self.data.state(first_row))}


def restore_position(data: PreparedData, checkpoint: Path) -> None:
    """Go on where the checkpoint was, also where the store knows nothing of what came before.

    Raises:
        DataError: the data are not those of the checkpoint.
    """
    path = checkpoint / FILE_NAME
    if path.exists():  # one that another program wrote has none
        data.restore(json.loads(path.read_text()))
