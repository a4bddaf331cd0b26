"""What became of each source: documents, tokens, what was left out and why, how full its rows are."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from cpt.data.checking.bad_rows import absurd_share
from cpt.data.windows.rows import WindowedRows
from cpt.recipe.schema import Source
from cpt.recipe.sense_data import reported_name

Key = TypeVar("Key")
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
    """File -> xxh3-128 of its content, once all of the source was read."""
    licence: str | None
    """As the recipe tells it."""
    is_estimate: bool
    """Whether the numbers follow from the windows read so far, because not all of the source was."""


def report_on(rows: WindowedRows) -> SourceReport:
    """What is known of a source so far; its share is known when all sources are."""
    (known, windows), source = rows.known_so_far(), rows.tokenized.work.source
    plan, total = rows.tokenized.plan, rows.total
    scale = 1.0 if total is not None else sum(plan.num_bytes) / max(1, plan.bytes_upto[windows])

    def scaled(counts: Mapping[Key, int]) -> dict[Key, int]:
        return {name: round(scale * count) for name, count in counts.items()}

    description = rows.tokenized.description
    return SourceReport(
        name=reported_name(source),
        documents=round(scale * known.documents),
        held_out=round(scale * known.held_out),
        dropped=scaled(known.left_out),
        bad_rows=scaled(known.bad_rows),
        lengths=dict(sorted(scaled(known.lengths).items())),
        tokens=round(scale * known.tokens),
        rows=round(scale * known.rows),
        padding=1 - known.tokens_in_rows / max(1, known.positions),
        share=0.0,
        files=description.files if description else {},
        licence=source.licence if isinstance(source, Source) else None,
        is_estimate=total is None,
    )


def tell(report: SourceReport, rows: WindowedRows) -> None:
    """Say what became of a source, and warn of an absurd document."""
    known, windows = rows.known_so_far()
    where, longest = known.longest
    # Of an example a row holds no more than its beginning.
    is_whole = rows.layout.form == "document" and not report.is_estimate
    if is_whole and (giant := absurd_share(report.name, where, longest, report.tokens, report.documents)):
        log.warning(giant)
    about = (
        f"about, by the first {windows} of {len(rows.tokenized.plan.windows)} windows, " if report.is_estimate else ""
    )
    dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in report.dropped.items())
    counts = (
        f"{report.documents:,} documents, {report.tokens:,} tokens in {report.rows:,} rows ({report.padding:.2%}"
        " padding)"
    )
    bad = "".join(f", {count:,} bad ({reason})" for reason, count in report.bad_rows.items())
    log.info(f"{report.name}: {about}{counts}, {report.held_out:,} held out{dropped}{bad}")
