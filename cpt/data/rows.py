"""The rows of one source: packed documents as the tensors that a causal language model takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import overload

import numpy as np
import torch

from cpt.data.packing import open_packing
from cpt.data.store import TokenStore

Row = dict[str, torch.Tensor]
IGNORED = -100  # the label that transformers leaves out of the loss


class PackedRows(Sequence[Row]):
    """Row r of a source, by number.

    A row is {"input_ids", "labels", "position_ids"}, int64 of `sequence_length`. Positions begin anew with each document, which is all that
    transformers needs to keep documents apart; a document's first token has no label, since what stands before it is another document.
    Padding comes last, as a document of its own without labels.
    """

    def __init__(self, store: TokenStore, packing_folder: Path, sequence_length: int, pad: int) -> None:
        self.store, self.packing_folder, self.sequence_length, self.pad = store, packing_folder, sequence_length, pad
        self.packing = open_packing(packing_folder)

    def __reduce__(self) -> tuple[type["PackedRows"], tuple[TokenStore, Path, int, int]]:
        """Worker processes open the files themselves."""
        return PackedRows, (self.store, self.packing_folder, self.sequence_length, self.pad)

    def __len__(self) -> int:
        return self.packing.num_rows

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
        input_ids = np.full(self.sequence_length, self.pad, np.int64)
        position_ids = np.empty(self.sequence_length, np.int64)
        at = 0
        first, after = self.packing.first_piece[number : number + 2]
        for start, length in zip(self.packing.starts[first:after].tolist(), self.packing.lengths[first:after].tolist(), strict=True):
            input_ids[at : at + length] = self.store.tokens[start : start + length]
            position_ids[at : at + length] = np.arange(length)
            at += length
        position_ids[at:] = np.arange(self.sequence_length - at)
        labels = np.where(position_ids == 0, IGNORED, input_ids)
        labels[at:] = IGNORED
        return {name: torch.from_numpy(a) for name, a in (("input_ids", input_ids), ("labels", labels), ("position_ids", position_ids))}


def stack_rows(rows: Sequence[Row]) -> Row:
    """Rows of [T] to a batch of [B, T]."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
