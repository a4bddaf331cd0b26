"""The rows of examples that a trainer makes its own tensors of: one example a row, as lists of ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from cpt.data.examples.segments import CONTEXT, LEARNED, ROW, UNWANTED
from cpt.data.rows import PackedRows
from cpt.data.store.token_files import StoredDocuments


class ExampleRows(PackedRows):
    """Row r of a source, by number.

    preference: {"prompt_ids", "chosen_ids", "rejected_ids"}, lists of ids. judged: {"prompt_ids", "completion_ids",
    "label"}. Prompt and completion are cut at their end to `sequence_length` ids together. prompt: the columns of the
    file's row, with the prompt as "prompt".
    """

    def __init__(
        self, documents: StoredDocuments, packing_folder: Path, sequence_length: int, pad: int, form: str
    ) -> None:
        super().__init__(documents, packing_folder, sequence_length, pad)
        self.form = form

    def __reduce__(self) -> Any:
        """Worker processes open the files themselves."""
        return type(self), (self.documents, self.packing_folder, self.sequence_length, self.pad, self.form)

    @property
    def num_positions(self) -> int:
        """There is no padding before a trainer puts rows together."""
        return self.num_tokens

    def row(self, number: int, epoch: int) -> dict[str, Any]:  # type: ignore[override]
        """Row `number` as it is in an epoch: in each, examples of one length change places."""
        starts, lengths = self.packing.pieces(number, epoch)
        start, length = int(starts[0]), int(lengths[0])
        ids, segments = self.documents.tokens(start, length), self.documents.segments(start, length)
        if self.form == "prompt":
            row: dict[str, Any] = json.loads(ids[segments == ROW].astype(np.uint8).tobytes())
            return row
        prompt = ids[segments == CONTEXT].tolist()
        room = self.sequence_length - len(prompt)
        wanted, unwanted = (ids[segments == segment][:room].tolist() for segment in (LEARNED, UNWANTED))
        if self.form == "preference":
            return {"prompt_ids": prompt, "chosen_ids": wanted, "rejected_ids": unwanted}
        return {"prompt_ids": prompt, "completion_ids": wanted or unwanted, "label": bool(wanted)}
