"""The segments of examples: to which part each stored token belongs, and what a row can hold of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpt.data.store.token_files import StoredDocuments

CONTEXT, LEARNED, UNWANTED, ROW = 0, 1, 2, 3
"""Read and not learned; learned (the assistant's words, what was chosen or wanted); rejected or unwanted; a byte of
the row."""
Segments = NDArray[np.uint8]
Int64 = NDArray[np.int64]
NOTHING_LEARNED = "nothing to learn within sequence_length"
LONG_PROMPT = "prompt longer than sequence_length"


class Fitting(NamedTuple):
    numbers: Int64
    lengths: Int64
    """Stored ids of each that its row is made of."""
    tokens: Int64
    """Tokens of each that the model reads."""
    left_out: dict[str, int]


def fitting(documents: StoredDocuments, chosen: Int64, form: str, sequence_length: int) -> Fitting:
    """Which of the chosen documents fit, and how much of each: a document all of it, an example cut at its end.

    A conversation needs a token to learn behind its first one; others need room for a completion behind their prompt,
    or for the prompt.
    """
    lengths = np.diff(documents.offsets)[chosen]
    if form == "document":
        return Fitting(chosen, lengths, lengths, {})
    if form == "conversation":
        cut = np.minimum(lengths, sequence_length)
        fits, reason = learns_of(documents, sequence_length)[chosen], NOTHING_LEARNED
        tokens = cut
    else:
        prompts = context_of(documents)[chosen]
        fits, reason = prompts < sequence_length + (form == "prompt"), LONG_PROMPT
        cut, tokens = lengths, prompts if form == "prompt" else lengths
    left_out = {} if fits.all() else {reason: int((~fits).sum())}
    return Fitting(chosen[fits], cut[fits], tokens[fits], left_out)


def context_of(documents: StoredDocuments) -> Int64:
    return of_each(
        documents, lambda segments, begins, ends: np.add.reduceat(segments == CONTEXT, begins, dtype=np.int64)
    )


def learns_of(documents: StoredDocuments, sequence_length: int) -> NDArray[np.bool_]:
    """Whether each document has a token to learn among its first `sequence_length`, but for the very first, which
    nothing stands before."""

    def learns(segments: Segments, begins: Int64, ends: Int64) -> Int64:
        lasts = np.minimum(ends, begins + sequence_length)
        bounds = np.stack([np.minimum(begins + 1, ends - 1), lasts], axis=1).ravel()
        found = np.maximum.reduceat(np.append(segments, np.uint8(CONTEXT)), bounds)[::2]
        return (found == LEARNED) & (lasts - begins > 1)

    return of_each(documents, learns).astype(bool)


def of_each(documents: StoredDocuments, function: Callable[[Segments, Int64, Int64], NDArray[Any]]) -> NDArray[Any]:
    """What a function gives for the segments of each folder, and where in them its documents begin and end."""
    found = [
        function(part.segments, part.offsets[:-1], part.offsets[1:])
        for part in documents.parts
        if part.description.documents
    ]
    return np.concatenate([np.empty(0, np.int64), *found])
