"""What became of each source: documents, tokens, what was left out and why, how full its rows are."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpt.data.bad_rows import absurd_share
from cpt.data.rows import PackedRows
from cpt.data.store import TokenStore
from cpt.ranks import is_main_process

log = logging.getLogger("cpt")


@dataclass(frozen=True)
class SourceReport:
    """What became of one source."""

    name: str
    documents: int
    """Trained on."""
    held_out: int
    """Kept from training, because the model is judged by them or by an equal document of a held-out set."""
    dropped: dict[str, int]
    """Reason -> documents."""
    bad_rows: dict[str, int]
    """Reason -> rows that were no documents."""
    lengths: dict[int, int]
    """Documents trained on, by length: n, a power of two, stands for n up to 2n - 1 tokens."""
    tokens: int
    """Of the documents trained on, once."""
    rows: int
    padding: float
    """Share of the rows' positions that hold no token."""
    share: float
    """Of the training tokens, as asked; of phases, over the whole run where its length is known, else of the first."""
    files: dict[str, str]
    """File -> xxh3-128 of its content."""


def report_on(name: str, store: TokenStore, rows: PackedRows, chosen: NDArray[np.int64], repeated: Mapping[str, int]) -> SourceReport:
    """Count what became of a source, and say it once; its share is known when all sources are.

    Args:
        chosen: the documents that are trained on.
        repeated: documents left out because they were there before, by reason.
    """
    lengths = np.diff(store.offsets)[chosen]
    tokens = int(lengths.sum())
    what, held_out = store.description, len(store.hashes) - len(chosen) - sum(repeated.values())
    all_dropped = {**what.dropped, **{reason: count for reason, count in repeated.items() if count}}
    padding = 1 - rows.num_tokens / (len(rows) * rows.sequence_length)
    if is_main_process():
        longest = int(lengths.max())
        if giant := absurd_share(name, what.longest[0] if what.longest[1] == longest else "", longest, tokens, len(chosen)):
            log.warning(giant)
        dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in all_dropped.items())
        counts = f"{len(chosen):,} documents, {tokens:,} tokens in {len(rows):,} rows ({padding:.2%} padding)"
        bad = "".join(f", {count:,} bad ({reason})" for reason, count in what.bad_rows.items())
        log.info(f"{name}: {counts}, {held_out:,} held out{dropped}{bad}")
    return SourceReport(
        name=name,
        documents=len(chosen),
        held_out=held_out,
        dropped=all_dropped,
        bad_rows=what.bad_rows,
        lengths=by_power_of_two(lengths),
        tokens=tokens,
        rows=len(rows),
        padding=padding,
        share=0.0,
        files=what.files,
    )


def by_power_of_two(lengths: NDArray[np.int64]) -> dict[int, int]:
    """How many lengths there are from each power of two to the next; lengths are 1 at least."""
    exponents, counts = np.unique(np.frexp(lengths)[1] - 1, return_counts=True)
    return {2**exponent: count for exponent, count in zip(exponents.tolist(), counts.tolist(), strict=True)}
