"""How the documents of a source, or of a held-out set, are laid out in rows."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpt.data.examples.rows import ExampleRows
from cpt.data.forms import ONE_A_ROW
from cpt.data.packing import fill_packing
from cpt.data.rows import PackedRows, kind_of_rows
from cpt.data.store.token_files import StoredDocuments

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """How documents are laid out in rows."""

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
        """All that decides the rows, for a key."""
        return {name: value for name, value in asdict(self).items() if name != "form" or value != "document"}

    def packer(self, starts: Int64, lengths: Int64, seed: int) -> Callable[[Path], None]:
        """What writes the packing into an empty folder; an example that is a row by itself is never cut."""
        if self.is_one_a_row:
            return partial(fill_packing, starts, lengths, int(lengths.max()), "none", seed, None)
        return partial(fill_packing, starts, lengths, self.sequence_length, self.packing, seed, self.stride)

    def open(self, documents: StoredDocuments, folder: Path) -> PackedRows:
        """The rows whose packing lies in a folder."""
        if self.is_one_a_row:
            return ExampleRows(documents, folder, self.sequence_length, self.pad, self.form)
        return kind_of_rows(self.packing)(documents, folder, self.sequence_length, self.pad)
