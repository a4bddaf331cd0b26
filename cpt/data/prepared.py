"""All that a run reads: its rows, held-out sets, and what is known of its sources."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpt.data.checking.report import SourceReport
from cpt.data.held_out import HeldOutSet
from cpt.data.mixture.mixture import MixtureRows
from cpt.data.store.tokenized import TokenizedSource
from cpt.data.windows.read_ahead import ReadAhead
from cpt.data.windows.rows import WindowedRows
from cpt.errors import DataError


@dataclass(frozen=True)
class PreparedData:
    """All that a run reads."""

    rows: MixtureRows
    windowed: list[WindowedRows]
    """The same rows by source."""
    held_out: dict[str, HeldOutSet]
    sources: list[SourceReport]
    fingerprint: str
    """Changes when any training row, or the order of rows, does; moving or touching files changes nothing."""
    disk_bytes: int | None
    """That large sources may take on this machine's disk."""
    form: str = "document"
    """What the rows are: see `cpt.data.forms`."""
    held_out_files: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of each held-out set with files of its own: file -> xxh3-128 of its content."""
    judges: list[TokenizedSource] = field(default_factory=list)
    """The held-out sets with files of their own, as they are stored."""

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
        """Each source's share of these tokens."""
        tokens = self.tokens(rows, first)
        return {name: number / sum(tokens.values()) for name, number in tokens.items()}

    def filled(self, rows: int, first: int = 0) -> float:
        """The share of tokens among the positions of these rows; the rest is padding."""
        return sum(self.tokens(rows, first).values()) / ((rows - first) * self.windowed[0].layout.sequence_length)

    def epochs(self, rows: int) -> dict[str, float]:
        """How many times the first `rows` rows go through each source."""
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
        """Take over what a checkpoint kept.

        Raises:
            DataError: it was kept of other data.
        """
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                "the checkpoint was written with other data than the recipe gives now. Bring them back, or begin a new"
                " run."
            )
        for report, rows in zip(self.sources, self.windowed, strict=True):
            if report.name in state["windows"]:
                rows.restore(state["windows"][report.name])
