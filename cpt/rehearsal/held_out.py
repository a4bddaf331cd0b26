"""A few documents of a held-out set, the longest ones, so that an evaluation takes as much memory as the whole would,
and less time."""

import numpy as np

from cpt.cache import default_cache_dir
from cpt.data.held_out import HeldOutSet, held_out_set
from cpt.data.rows.rows import Layout, PackedRows

BATCHES = 4
FEWEST_DOCUMENTS = 30  # the verdict's intervals are made of documents


def shortened_set(held_out: HeldOutSet, packing: str, rows_at_once: int) -> HeldOutSet:
    """The set itself where it is small.

    Args:
        packing: of the recipe.
        rows_at_once: of all processes, in one batch of the evaluation.
    """
    rows, chosen = held_out.rows, held_out.chosen
    if chosen is None or not isinstance(rows, PackedRows) or len(rows) <= BATCHES * rows_at_once:
        return held_out
    lengths = np.diff(rows.documents.offsets)[chosen]
    by_length = np.argsort(-lengths, kind="stable")
    enough = 1 + int(np.searchsorted(np.cumsum(lengths[by_length]), BATCHES * rows_at_once * rows.sequence_length))
    kept = np.sort(by_length[: max(FEWEST_DOCUMENTS, enough)])
    layout = Layout(rows.sequence_length, packing, None, rows.pad, held_out.form)
    return held_out_set(held_out.name, rows.documents, chosen[kept], layout, default_cache_dir())
