"""A curriculum of lengths: documents that are longer than a phase reads at once come as pieces that do not see each
other.

Rows, and with them steps, memory and the order of the data, stay what they are from the first step to the last, so a
run resumes as ever. What grows is how far a token looks back, and with attention that leaves the other pieces out,
what a step costs.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cpt.data.rows import IGNORED
from cpt.recipe.schema import Data

Int64 = NDArray[np.int64]
Lengths = list[tuple[int, int]]  # (row, tokens that are read at once from this row on), in the order of rows


def lengths_of_phases(data: Data) -> Lengths:
    """From which rows on how many tokens are read at once; empty where that is the whole row throughout."""
    if all(phase.context_length is None for phase in data.phases):
        return []
    lengths, first = [], 0
    for phase in data.phases:
        lengths.append((first, phase.context_length or data.sequence_length))
        first = first if phase.until is None else round(phase.until / data.sequence_length)
    return lengths


def length_at(number: int, lengths: Sequence[tuple[int, int]]) -> int | None:
    """What row `number` is cut to; None where there is no curriculum."""
    place = bisect_right(lengths, number, key=lambda change: change[0])
    return lengths[place - 1][1] if place else None


def cut_documents(position_ids: Int64, labels: Int64, length: int) -> None:
    """Cut the documents of a row, in place: positions begin anew in each piece, and a piece's first token is predicted
    from nothing."""
    if len(position_ids) <= length:
        return
    position_ids %= length
    labels[position_ids == 0] = IGNORED
