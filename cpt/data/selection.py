"""Which of a source's documents are trained on, and which are kept for evaluation; by the hash of their text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from cpt.data.plan import ORDERED_PARTS
from cpt.data.quality.duplicates import Repeated
from cpt.data.store.token_files import StoredDocuments

AFTER_MAX_TOKENS = "after max_tokens"  # a reason to leave documents out
ROWS_OF_A_PART = 8  # at least, of a source that is read by a score
# A longer document is never held out: it would be much of the held-out bytes, and the interval of the verdict would
# rest on it. With fewer than 20 documents to hold out, a fifth of their bytes is little more than an average document,
# so four of these are allowed.
LARGEST_PART, LARGEST_OF_AVERAGE = 1 / 5, 4


@dataclass(frozen=True)
class Chosen:
    """The documents that are trained on, by number, and what became of the others."""

    documents: NDArray[np.int64]
    held_out: int
    left_out: dict[str, int]
    """Reason -> documents."""
    is_limit_reached: bool
    """Whether `max_tokens` leaves nothing of what comes after."""


@dataclass(frozen=True)
class Selection:
    """Which of a source's documents are trained on.

    Attributes:
        held_out_share: of the documents that is kept from training, by the hash of their text.
        longest_held_out: bytes; a longer document is trained on whatever its hash is.
        judged: hashes of documents that the model is judged by, sorted.
        repeated: what was there before, if it is to be left out.
        max_tokens: of the source; its documents come in the order of the windows.
    """

    held_out_share: float | None
    judged: NDArray[np.uint64]
    repeated: Repeated | None
    max_tokens: int | None
    longest_held_out: int | None = None

    def content(self) -> dict[str, Any]:
        """All that decides it, for a key."""
        return {
            "held_out_share": self.held_out_share,
            "judged": xxh3_128_hexdigest(self.judged.tobytes()),
            "repeated": self.repeated and self.repeated.name,
            "max_tokens": self.max_tokens,
            "longest_held_out": self.longest_held_out,
        }

    def choose(self, documents: StoredDocuments, shards: Sequence[int], tokens_before: int) -> Chosen:
        """Among the documents of some shards.

        Args:
            tokens_before: that were chosen in front of these.
        """
        hashes = documents.hashes
        repeated = self.is_repeated(shards)
        is_first = ~np.logical_or.reduce([*repeated.values(), np.zeros(len(hashes), bool)])
        is_allowed = is_first & ~self.is_held_out(documents) & ~np.isin(hashes, self.judged)
        left_out = {reason: int(which.sum()) for reason, which in repeated.items() if which.any()}
        chosen, number = np.flatnonzero(is_allowed), int(is_allowed.sum())
        if self.max_tokens is not None:
            tokens = tokens_before + np.diff(documents.offsets)[chosen].cumsum()
            number = int(np.searchsorted(tokens, self.max_tokens, "right"))
            if number < len(chosen):
                left_out[AFTER_MAX_TOKENS] = len(chosen) - number
        held_out = int(is_first.sum()) - len(chosen)
        return Chosen(chosen[:number], held_out, left_out, is_limit_reached=number < len(chosen))

    def held_out(self, documents: StoredDocuments, shards: Sequence[int]) -> NDArray[np.int64]:
        """The documents that the hash of their text keeps from training, each text once."""
        is_repeated = np.logical_or.reduce([*self.is_repeated(shards).values(), np.zeros(len(documents), bool)])
        return np.flatnonzero(self.is_held_out(documents) & ~is_repeated)

    def is_held_out(self, documents: StoredDocuments) -> NDArray[np.bool_]:
        """Which documents the hash of their text keeps from training."""
        if self.held_out_share is None:
            return np.zeros(len(documents), bool)
        return is_held_out(documents.hashes, documents.num_bytes, self.held_out_share, self.longest_held_out)

    def is_repeated(self, shards: Sequence[int]) -> dict[str, NDArray[np.bool_]]:
        """Documents of these shards that were there before, by reason."""
        return {} if self.repeated is None else self.repeated.of_shards(shards)


def is_held_out(
    hashes: NDArray[np.uint64], num_bytes: NDArray[np.int64], share: float, longest: int | None = None
) -> NDArray[np.bool_]:
    """Which documents are held out.

    Args:
        hashes, num_bytes: xxh3-64 of each document's text and its UTF-8 bytes.
        share: of the documents.
        longest: bytes of the longest that may be; None: any.
    """
    is_chosen = hashes < np.uint64(int(share * 2**64))
    return is_chosen if longest is None else is_chosen & (num_bytes <= longest)


def longest_held_out(total_bytes: int, num_documents: int, share: float) -> int:
    """Bytes of the longest document that may be held out, so that no single one decides what the others say."""
    return int(total_bytes * max(LARGEST_PART * share, LARGEST_OF_AVERAGE / max(1, num_documents)))


def part_by_score(
    documents: StoredDocuments, chosen: NDArray[np.int64], part: int, sequence_length: int
) -> NDArray[np.int64]:
    """A part of the chosen documents, by their score: equally many tokens each; fewer parts than there may be where
    each would be tiny."""
    order = chosen[np.argsort(documents.scores[chosen], kind="stable")]
    ends = np.diff(documents.offsets)[order].cumsum()
    parts = int(np.clip(ends[-1] // (ROWS_OF_A_PART * sequence_length), 1, ORDERED_PARTS)) if len(order) else 1
    bounds = (
        np.searchsorted(ends, [ends[-1] * part / parts, ends[-1] * (part + 1) / parts], "left")
        if len(order)
        else [0, 0]
    )
    last = len(order) if part + 1 == parts else bounds[1]
    return order[bounds[0] : last] if part < parts else order[:0]
