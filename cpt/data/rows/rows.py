"""The rows of one source: packed documents as the tensors that a causal language model takes, or examples as lists of
ids."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray

from cpt.data.examples.encoder import CONTEXT, LEARNED, ROW, UNWANTED
from cpt.data.readers.columns import ONE_A_ROW
from cpt.data.rows.packing import fill_packing, open_packing
from cpt.data.store.token_files import StoredDocuments

Row = dict[str, torch.Tensor]
NAMES = ("input_ids", "labels", "position_ids")
Int64 = NDArray[np.int64]
IGNORED = -100  # the label that transformers leaves out of the loss


class PackedRows(Sequence[Row]):
    """Row r of a source, by number.

    A row is {"input_ids", "labels", "position_ids"}, int64 of `sequence_length`. Positions begin anew with each
    document, which is all that transformers needs to keep documents apart; a document's first token has no label,
    since what stands before it is another document, and of an example only what is learned has labels. Padding comes
    last, as a document of its own without labels.
    """

    def __init__(self, documents: StoredDocuments, packing_folder: Path, sequence_length: int, pad: int) -> None:
        self.documents, self.packing_folder = documents, packing_folder
        self.sequence_length, self.pad = sequence_length, pad
        self.packing = open_packing(packing_folder)
        self._counting = np.arange(sequence_length)

    def __reduce__(self) -> tuple[type["PackedRows"], tuple[StoredDocuments, Path, int, int]]:
        return type(self), (self.documents, self.packing_folder, self.sequence_length, self.pad)

    def __len__(self) -> int:
        return self.packing.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens in the rows, padding left out; where windows overlap these are more than the documents have."""
        return int(self.packing.lengths.sum())

    @property
    def num_positions(self) -> int:
        return len(self) * self.sequence_length

    @overload
    def __getitem__(self, number: int) -> Row: ...
    @overload
    def __getitem__(self, number: slice) -> list[Row]: ...
    def __getitem__(self, number: int | slice) -> Row | list[Row]:
        if isinstance(number, slice):
            return [self[n] for n in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return self.row(number, epoch=0)

    def row(self, number: int, epoch: int) -> Row:
        """Row `number` as it is in an epoch: in each, documents of one length change places, so that others share a
        row."""
        arrays = np.empty((3, self.sequence_length), np.int64)
        self.fill(number, epoch, *arrays)
        return dict(zip(NAMES, torch.from_numpy(arrays), strict=True))

    def fill(self, number: int, epoch: int, input_ids: Int64, labels: Int64, position_ids: Int64) -> None:
        """Write a row into arrays of `sequence_length`, which may be lines of a batch."""
        at, counting, begins = 0, self._counting, []
        starts, lengths = self.packing.pieces(number, epoch)
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            begins.append(at)
            after = at + length
            input_ids[at:after] = self.documents.tokens(start, length)
            position_ids[at:after] = counting[:length]
            at = after
        if at < self.sequence_length:
            input_ids[at:] = self.pad
            position_ids[at:] = counting[: self.sequence_length - at]
        labels[:at] = input_ids[:at]
        labels[at:] = IGNORED
        if self.documents.are_examples:
            segments = [
                self.documents.segments(start, length)
                for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
            ]
            labels[:at][np.concatenate(segments) == CONTEXT] = IGNORED
        for begin in begins:
            labels[begin] = IGNORED


class PaddedRows(PackedRows):
    """Rows of `packing: token_budget`: each is a batch by itself, whose documents do not share a sequence.

    A row is {"input_ids", "labels", "position_ids", "attention_mask"}, int64 of [documents, longest]; together at most
    `sequence_length`.
    """

    @property
    def num_positions(self) -> int:
        """Tokens, and the padding up to the longest document of each row."""
        packing = self.packing
        return int(
            (np.diff(packing.first_piece) * np.maximum.reduceat(packing.lengths, packing.first_piece[:-1])).sum()
        )

    def row(self, number: int, epoch: int) -> Row:
        """Row `number` as it is in an epoch: in each, documents of one length change places."""
        starts, lengths = self.packing.pieces(number, epoch)
        position_ids = np.tile(np.arange(lengths.max()), (len(lengths), 1))
        attention_mask = (position_ids < lengths[:, None]).astype(np.int64)
        input_ids = np.full(position_ids.shape, self.pad, np.int64)
        for line, start, length in zip(input_ids, starts.tolist(), lengths.tolist(), strict=True):
            line[:length] = self.documents.tokens(start, length)
        labels = np.where((position_ids == 0) | (attention_mask == 0), IGNORED, input_ids)
        for line, start, length in (
            zip(labels, starts.tolist(), lengths.tolist(), strict=True) if self.documents.are_examples else ()
        ):
            line[:length][self.documents.segments(start, length) == CONTEXT] = IGNORED
        arrays = {
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def stack_rows(rows: Sequence[Row]) -> Row:
    """Rows of [T] to a batch of [B, T]; one row of [documents, longest] is a batch already."""
    if rows[0]["input_ids"].dim() == 2:
        (row,) = rows
        return row
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# --- rows ---


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


# --- layout ---


@dataclass(frozen=True)
class Layout:
    sequence_length: int
    packing: str
    stride: int | None
    pad: int
    form: str = "document"

    @property
    def is_one_a_row(self) -> bool:
        """Whether each example is a row by itself, that a trainer makes tensors of."""
        return self.form in ONE_A_ROW

    def content(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "form" or value != "document"}

    def packer(self, starts: Int64, lengths: Int64, seed: int) -> Callable[[Path], None]:
        """What writes the packing into an empty folder; an example that is a row by itself is never cut."""
        if self.is_one_a_row:
            return partial(fill_packing, starts, lengths, int(lengths.max()), "none", seed, None)
        return partial(fill_packing, starts, lengths, self.sequence_length, self.packing, seed, self.stride)

    def open(self, documents: StoredDocuments, folder: Path) -> PackedRows:
        if self.is_one_a_row:
            return ExampleRows(documents, folder, self.sequence_length, self.pad, self.form)
        rows = PaddedRows if self.packing == "token_budget" else PackedRows
        return rows(documents, folder, self.sequence_length, self.pad)
