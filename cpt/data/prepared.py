"""All that a run reads: its rows, held-out sets, and what is known of its sources."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cpt.data.held_out import HeldOutSet
from cpt.data.mixture import MixtureRows
from cpt.data.readers.documents import absurd_share
from cpt.data.rows.read_ahead import ReadAhead
from cpt.data.rows.windows import WindowedRows
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import DataError, RecipeError
from cpt.ranks import is_main_process
from cpt.recipe.rules import reported_name
from cpt.recipe.schema import Budget, Data, Source

Key = TypeVar("Key")
log = logging.getLogger("cpt")


@dataclass(frozen=True)
class SourceReport:
    name: str
    documents: int
    """Trained on."""
    held_out: int
    """Kept from training, because the model is judged by them or by an equal document of a held-out set."""
    dropped: dict[str, int]
    bad_rows: dict[str, int]
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
    is_estimate: bool
    """Whether the numbers follow from the windows read so far, because not all of the source was."""


def report_on(rows: WindowedRows) -> SourceReport:
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
    known, windows = rows.known_so_far()
    where, longest = known.longest
    # Of an example a row holds no more than its beginning.
    is_whole = rows.layout.form == "document" and not report.is_estimate
    if is_whole and (giant := absurd_share(report.name, where, longest, report.tokens, report.documents)):
        log.warning(giant)
    about = f"about, by the first {windows} of {len(rows.tokenized.plan.windows)} windows, "
    dropped = "".join(f", {count:,} dropped ({reason})" for reason, count in report.dropped.items())
    bad = "".join(f", {count:,} bad ({reason})" for reason, count in report.bad_rows.items())
    log.info(
        f"{report.name}: {about if report.is_estimate else ''}{report.documents:,} documents, {report.tokens:,} tokens"
        f" in {report.rows:,} rows ({report.padding:.2%} padding), {report.held_out:,} held out{dropped}{bad}"
    )


# --- repeats ---


def rows_of_run(data: Data, budget: Budget, rows_of_epoch: int) -> int:
    """Rows of the whole run. Without `global_batch_tokens` the run may be up to one step longer, because only the
    launch decides how long a step is.

    Args:
        rows_of_epoch: rows of all sources. An epoch counts rows, padding included: counted in tokens it would end
            before the last rows.
    """
    step = max(1, (budget.global_batch_tokens or 0) // data.sequence_length)
    if budget.tokens is not None:
        steps = math.ceil(budget.tokens / data.sequence_length / step)
    else:
        steps = steps_of_epochs(data, budget.epochs or 0, rows_of_epoch, step)
    return max(1, steps) * step


def steps_of_epochs(data: Data, epochs: float, rows_of_epoch: int, rows_per_step: int) -> int:
    """Whole steps of so many epochs: rounded up, or down where a source may not be read any further."""
    steps = epochs * rows_of_epoch / rows_per_step
    return math.floor(steps) if any(source.max_epochs == epochs for source in data.sources) else math.ceil(steps)


def refused(data: Data, name: str, epochs: float, tokens: int) -> str | None:
    """Why a run that goes through the source of this name so often may not start."""
    source = next(source for source in data.sources if reported_name(source) == name)
    if source.max_epochs is None or epochs <= source.max_epochs:
        return None
    return f"`max_epochs` of `{name}`: it has {tokens:,} tokens, the run needs {epochs:.2f} times as many"


def tell_repeats(data: Data, mixture: MixtureRows, reports: Sequence[SourceReport], rows: int) -> None:
    """Warn of the sources that a run of so many rows goes through more than once; refuse it where it may not."""
    epochs = [count / report.rows for report, count in zip(reports, mixture.turns.counts(rows), strict=True)]
    told = list(zip(reports, epochs, strict=True))
    if lacking := [why for report, times in told if (why := refused(data, report.name, times, report.tokens))]:
        raise RecipeError(
            f"{'; '.join(lacking)}. Lower its weight or the budget, add documents, or raise `max_epochs`."
        )
    repeated = [f"{report.name} {times:.2f} times ({report.tokens:,} tokens)" for report, times in told if times > 1]
    if repeated and is_main_process():
        log.warning(
            f"The run reads more than there is: {', '.join(repeated)}, each time in another order. "
            "`max_epochs` of a source would refuse it."
        )


# --- prepared ---


@dataclass(frozen=True)
class PreparedData:
    rows: MixtureRows
    windowed: list[WindowedRows]
    held_out: dict[str, HeldOutSet]
    sources: list[SourceReport]
    fingerprint: str
    """Changes when any training row, or the order of rows, does; moving or touching files changes nothing."""
    disk_bytes: int | None
    """That large sources may take on this machine's disk."""
    form: str = "document"
    """What the rows are: see `cpt.data.readers.forms`."""
    held_out_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of each held-out set with files of its own: file -> xxh3-128 of its content."""
    judges: list[TokenizedSource] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows of one epoch. With `budget.epochs` this is exact and the same after a resume, because the whole of each
        source is read first; otherwise it may be an estimate."""
        return sum(report.rows for report in self.sources)

    @property
    def num_tokens(self) -> int:
        """Of all sources once; an estimate where one is."""
        return sum(report.tokens for report in self.sources)

    def tokens(self, rows: int, first: int = 0) -> dict[str, float]:
        """Each source's tokens, without padding, among the rows from `first` to `rows`; arithmetic, nothing is
        read."""
        counts = [
            upto - before
            for upto, before in zip(self.rows.turns.counts(rows), self.rows.turns.counts(first), strict=True)
        ]
        return {
            report.name: count * rows.filled * rows.layout.sequence_length
            for report, rows, count in zip(self.sources, self.windowed, counts, strict=True)
        }

    def shares(self, rows: int, first: int = 0) -> dict[str, float]:
        tokens = self.tokens(rows, first)
        return {name: number / sum(tokens.values()) for name, number in tokens.items()}

    def filled(self, rows: int, first: int = 0) -> float:
        """The share of tokens among the positions of these rows; the rest is padding."""
        return sum(self.tokens(rows, first).values()) / ((rows - first) * self.windowed[0].layout.sequence_length)

    def epochs(self, rows: int) -> dict[str, float]:
        counts = self.rows.turns.counts(rows)
        return {report.name: count / report.rows for report, count in zip(self.sources, counts, strict=True)}

    def read_ahead(self, first_row: int) -> ReadAhead | None:
        """What makes the windows that a run from `first_row` on will come to, if there is any that is not there."""
        counts = self.rows.turns.counts(first_row)
        ahead = [
            number
            for number, rows in enumerate(self.windowed)
            if rows.tokenized.plan.is_streamed and (self.disk_bytes is not None or not rows.is_complete)
        ]
        shares = self.rows.turns.shares(first_row)
        if not ahead:
            return None
        chosen = [self.windowed[n] for n in ahead], [shares[n] for n in ahead], [counts[n] for n in ahead]
        return ReadAhead(*chosen, self.disk_bytes)

    def state(self, first_row: int) -> dict[str, Any]:
        """What a checkpoint keeps, to go on at `first_row` also where the store is empty."""
        counts = self.rows.turns.counts(first_row)
        windows = {
            report.name: rows.state(turn)
            for report, rows, turn in zip(self.sources, self.windowed, counts, strict=True)
            if rows.tokenized.plan.is_streamed
        }
        return {"fingerprint": self.fingerprint, "row": first_row, "windows": windows}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint kept."""
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                "the checkpoint was written with other data than the recipe gives now. Bring them back, or begin a new"
                " run."
            )
        for report, rows in zip(self.sources, self.windowed, strict=True):
            if report.name in state["windows"]:
                rows.restore(state["windows"][report.name])
