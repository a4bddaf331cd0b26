"""Keep the data with the run: windows are made ahead of it, and each checkpoint tells where it is in them."""

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.data.prepared import PreparedData
from cpt.data.read_ahead import ReadAhead
from cpt.data.store import write_once

FILE_NAME = "data_position.json"


class DataPosition(TrainerCallback):
    """Reads ahead while the run trains, and writes `data_position.json` into each checkpoint.

    Args:
        rows_per_step: rows in one optimizer step, over all processes.
    """

    def __init__(self, data: PreparedData, rows_per_step: int) -> None:
        self.data, self.rows_per_step = data, rows_per_step
        self.ahead: ReadAhead | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """On each machine one process begins to make what comes next."""
        if args.local_process_index == 0:
            self.ahead = self.data.read_ahead(state.global_step * self.rows_per_step)
            if self.ahead is not None:
                self.ahead.start()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Nothing more is needed."""
        if self.ahead is not None:
            self.ahead.stop()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Tell the place of the next row."""
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            write_once(folder / FILE_NAME, json.dumps(self.data.state(state.global_step * self.rows_per_step)))


def restore_position(data: PreparedData, checkpoint: Path) -> None:
    """Go on where the checkpoint was, also where the store knows nothing of what came before.

    Raises:
        DataError: the data are not those of the checkpoint.
    """
    path = checkpoint / FILE_NAME
    if path.exists():  # a run that was killed just before it was written finds the same in its store
        data.restore(json.loads(path.read_text()))
