"""The rows that a model is judged by and never trained on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from cpt.data.examples.segments import fitting
from cpt.data.layout import Layout
from cpt.data.packing import FORMAT
from cpt.data.rows import Row
from cpt.data.store.folder import hold, key_of, publish_derived
from cpt.data.store.token_files import StoredDocuments


@dataclass(frozen=True)
class HeldOutSet:
    """Documents that the model never trains on, in rows of their own."""

    name: str
    rows: Sequence[Row]
    num_documents: int
    num_tokens: int
    num_bytes: int
    """UTF-8 bytes of what is predicted: the documents' text, of conversations the answers."""
    chosen: NDArray[np.int64] | None = None
    """Which of the documents behind the rows are the set's; None where rows were made by hand, and documents cannot be
    told apart."""
    form: str = "document"
    """What the rows are: see `cpt.data.forms`."""


def held_out_set(
    name: str, documents: StoredDocuments, chosen: NDArray[np.int64], layout: Layout, cache_dir: Path
) -> HeldOutSet:
    """A set of the chosen documents; the same rows for every seed, so that runs can be compared."""
    # Windows that overlap more would count tokens twice, and rows that cut a document wherever they are full would
    # leave tokens out. These overlap by one token, which is not predicted a second time: so figures depend neither on
    # the packing nor on a row's length in tokens.
    packing = layout.packing if layout.packing in ("none", "token_budget") else "best_fit"
    stride = max(1, layout.sequence_length - 1)
    layout = replace(layout, packing=packing, stride=stride)
    # A conversation, or a text beside conversations, is trained on as far as a row holds it. It is judged to its end,
    # in windows, as a
    # document is: else the bits would be of its beginning, and the bytes of all of it.
    longest = int(np.diff(documents.offsets)[chosen].max(initial=layout.sequence_length))
    chosen, lengths, read, _ = fitting(
        documents, chosen, layout.form, layout.sequence_length if layout.is_one_a_row else longest
    )
    starts = documents.offsets[chosen]
    what = {
        "format": FORMAT,
        "documents": documents.digest,
        "chosen": xxh3_128_hexdigest(starts.tobytes()),
        "layout": [
            layout.sequence_length,
            packing,
            stride,
            *([] if layout.form == "document" else [layout.form, "whole"]),
        ],
    }
    folder = publish_derived(cache_dir / "rows" / key_of(what), layout.packer(starts, lengths, 0))
    rows = layout.open(documents, folder)
    hold(folder, rows)
    return HeldOutSet(
        name, rows, len(chosen), int(read.sum()), int(documents.num_bytes[chosen].sum()), chosen, layout.form
    )
