"""Where the rows of a source are: in which window, whatever was read before and whether the windows are on the disk.

What is known of each window is in a small file. After the last window it is in one table too, which is memory-mapped:
a process that looks for a row reads as much of it as a search does."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from shutil import rmtree
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpt.cache import hold, open_array, write_once
from cpt.data.examples.segments import LONG_PROMPT, NOTHING_LEARNED
from cpt.data.rows.selection import AFTER_MAX_TOKENS
from cpt.data.store.order import seed_of
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import DataError
from cpt.files import read_sealed, report_damage, sealed, size_and_hash

Key = TypeVar("Key")


@dataclass(frozen=True)
class WindowEntry:
    """What is known of a window, whether its tokens are there or not."""

    first_row: int
    """Rows of the windows before."""
    rows: int
    tokens_before: int
    """Tokens of the documents trained on in the windows before."""
    tokens: int
    """Of the documents trained on."""
    tokens_in_rows: int
    """More than these where windows of a document overlap."""
    positions: int
    """Of the rows, padding included."""
    documents: int
    """Trained on."""
    held_out: int
    left_out: dict[str, int]
    """Reason -> documents, those of the source's filters among them."""
    bad_rows: dict[str, int]
    lengths: dict[int, int]
    """Documents trained on, by length: n, a power of two, stands for n up to 2n - 1 tokens."""
    longest: tuple[str, int]
    own_digest: str
    """Of the documents trained on."""
    digest: str
    """Of these and of all in front of them."""

    @property
    def end(self) -> int:
        return self.first_row + self.rows


START = WindowEntry(0, 0, 0, 0, 0, 0, 0, 0, {}, {}, {}, ("", 0), "", "")


@dataclass(frozen=True)
class Total:
    """What one time through a source is."""

    rows: int
    windows: int
    has_table: bool
    """Whether what is known of each window is in one table."""
    everything: WindowEntry | None = None
    """The sum over all windows, where this was written down."""


def entry_of(content: Mapping[str, Any]) -> WindowEntry:
    lengths = {int(length): count for length, count in content["lengths"].items()}
    return WindowEntry(**{**content, "lengths": lengths, "longest": tuple(content["longest"])})


def summed(entries: Iterable[WindowEntry]) -> WindowEntry:
    """What is known of windows that follow each other, as if they were one."""
    whole = START
    for entry in entries:
        whole = WindowEntry(
            first_row=0,
            rows=whole.rows + entry.rows,
            tokens_before=0,
            tokens=whole.tokens + entry.tokens,
            tokens_in_rows=whole.tokens_in_rows + entry.tokens_in_rows,
            positions=whole.positions + entry.positions,
            documents=whole.documents + entry.documents,
            held_out=whole.held_out + entry.held_out,
            left_out=added([whole.left_out, entry.left_out]),
            bad_rows=added([whole.bad_rows, entry.bad_rows]),
            lengths=added([whole.lengths, entry.lengths]),
            longest=max(whole.longest, entry.longest, key=lambda place: place[1]),
            own_digest="",
            digest=entry.digest,
        )
    return whole


def added(counts: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def by_power_of_two(lengths: NDArray[np.int64]) -> dict[int, int]:
    """How many lengths there are from each power of two to the next; lengths are 1 at least."""
    exponents, counts = np.unique(np.frexp(lengths)[1] - 1, return_counts=True)
    return {2**exponent: count for exponent, count in zip(exponents.tolist(), counts.tolist(), strict=True)}


# --- table ---


TOTAL, TABLE = "total.json", "windows.npy"
COUNTS = [field.name for field in fields(WindowEntry) if field.type is int]
DIGESTS = ("own_digest", "digest")
LINE = np.dtype([*((name, np.int64) for name in COUNTS), *((name, "S32") for name in DIGESTS)])


def write_table(folder: Path, entries: Sequence[WindowEntry]) -> None:
    """Write what is known of all windows, the table first: where the total stands, all is there."""
    table = np.array([tuple(vars(entry)[name] for name in (*COUNTS, *DIGESTS)) for entry in entries], LINE)
    write_once(folder / TABLE, lambda path: save(path, table))
    digest = size_and_hash(folder / TABLE)[1]
    write_total(folder, entries[-1].end, len(entries), {"sum": asdict(summed(entries)), "table": digest})


def write_total(folder: Path, rows: int, windows: int, besides: Mapping[str, Any] | None = None) -> None:
    write_once(folder / TOTAL, sealed({"rows": rows, "windows": windows, **(besides or {})}))


def save(path: Path, table: NDArray[Any]) -> None:
    with path.open("wb") as file:
        np.save(file, table)


def read_total(folder: Path) -> Total | None:
    """What one time through is; None where its last window was not made yet, or where the total or the table is
    damaged."""
    content = read_sealed(folder / TOTAL)
    digest = None if content is None else content.get("table")
    if digest is not None and not is_table(folder / TABLE, digest):
        report_damage(folder / TABLE)
        content = None
    if content is None:
        with suppress(OSError):
            (folder / TOTAL).unlink()  # else each look at it would report the damage
        return None
    everything = content.get("sum")
    return Total(
        content["rows"], content["windows"], digest is not None, None if everything is None else entry_of(everything)
    )


def is_table(path: Path, digest: str) -> bool:
    return path.exists() and size_and_hash(path)[1] == digest


def open_table(folder: Path) -> NDArray[Any]:
    """The table, memory-mapped.

    Raises:
        OSError: there is none.
    """
    return open_array(folder / TABLE)


def entry_in(table: NDArray[Any], window: int) -> WindowEntry:
    """A window as the table knows it: without what is only kept as a sum."""
    line = table[window]
    counts = {name: int(line[name]) for name in COUNTS}
    digests = {name: line[name].decode() for name in DIGESTS}
    return entry_of({**counts, **digests, "left_out": {}, "bad_rows": {}, "lengths": {}, "longest": ("", 0)})


# --- complaints ---


def refuse_bad_windows(tokenized: TokenizedSource, known: WindowEntry, window: int) -> None:
    """Stop where more rows of the windows so far are bad than the recipe allows for as many as the whole source is
    estimated to have.

    Args:
        known: the sum of what is known of them.

    Raises:
        DataError: with what to do.
    """
    plan, bad = tokenized.plan, sum(known.bad_rows.values())
    if plan.is_whole or not bad:
        return
    rows = bad + known.documents + known.held_out + sum(known.left_out.values())
    read = plan.bytes_upto[window + 1]
    if bad > tokenized.max_bad_share * rows * sum(plan.num_bytes) / max(1, read):
        source, key = tokenized.work.source, tokenized.work.key
        raise DataError(
            f"{source.path}: {bad:,} of the first {rows:,} rows are bad, more than `data.max_bad_share`"
            f" ({tokenized.max_bad_share:.2%}) allows for all of it. Look at them: cpt data check. Fix the files"
            f" ({key}.path), or raise the share."
        )


def all_held_out(tokenized: TokenizedSource, entry: WindowEntry) -> str:
    if long := {
        reason: entry.left_out[reason] for reason in (NOTHING_LEARNED, LONG_PROMPT) if entry.left_out.get(reason)
    }:
        told = ", ".join(f"{count:,}: {reason}" for reason, count in long.items())
        return (
            f"{tokenized.work.source.path}: none of its examples is left to train on ({told}; {entry.held_out:,} are"
            " kept for evaluation). Set a higher `data.sequence_length`, or bring shorter examples."
        )
    if not entry.held_out:
        return (
            f"{tokenized.work.source.path}: `{tokenized.work.key}.max_tokens` is less than its first document has:"
            " none is left to train on. Set it higher."
        )
    return (
        f"{tokenized.work.source.path}: all {entry.held_out:,} documents are kept for evaluation, none is left to"
        f" train on. Set `{tokenized.work.key}.path` to more documents, a smaller `evaluation.held_out_share`, other"
        " files in `evaluation.perplexity`."
    )


def other_documents(tokenized: TokenizedSource) -> str:
    """What to say where a window is not what it was."""
    return (
        f"{tokenized.work.source.path}: its documents are not those that the run began with, so it cannot go on as it"
        f" would have. Bring the files back ({tokenized.work.key}.path), or begin a new run: another `name`."
    )


def used_up(tokenized: TokenizedSource, max_epochs: float) -> str:
    """What to say where a source may not be repeated (again)."""
    return (
        f"{tokenized.work.source.path}: used up after {max_epochs:g} time(s) through it. Lower its weight or the"
        f" budget, add documents, or raise `{tokenized.work.key}.max_epochs`."
    )


# --- index ---


MARKS = "readers"


class WindowIndex(ABC):
    """What is known of the windows of a source, each in a small file of a folder, and how a turn is found among them.

    Args:
        max_epochs: how often the source may be gone through.
    """

    def __init__(self, tokenized: TokenizedSource, folder: Path, seed: int, max_epochs: float | None) -> None:
        self.tokenized, self.folder, self.seed, self.max_epochs = tokenized, folder, seed, max_epochs
        hold(folder, self)
        self._entries: dict[int, WindowEntry] = {}
        self._near = 0  # a window whose entry is known, to search from
        self._total: Total | None = None
        self._sum: WindowEntry | None = (
            None  # of the windows known when this process kept its first one, and of those kept since
        )
        self._orders: dict[int, tuple[list[int], list[int]]] = {}

    @abstractmethod
    def make(self, window: int) -> None:
        """Pack a window, all before which are known, and `keep` what is in it."""

    @property
    def total(self) -> "Total | None":
        """What one time through is, once its last window was made."""
        if self._total is None:
            self._total = read_total(self.folder)
        return self._total

    @cached_property
    def table(self) -> NDArray[Any] | None:
        """What is known of all windows; to be asked for where there is a total.

        There is none of windows before those of a checkpoint that went on in an empty store.
        """
        return open_table(self.folder) if self.total is not None and self.total.has_table else None

    def known_entry(self, window: int) -> WindowEntry | None:
        """What is known of a window; None where it was never made."""
        if window in self._entries:
            return self._entries[window]
        if self.total is not None and self.table is not None:
            return entry_in(self.table, window) if window < len(self.table) else None
        content = read_sealed(self.entry_file(window))
        if content is None:
            return None
        entry = entry_of(content)
        if self.total is None and self.is_last(window, entry) and (not window or self.entry_file(window - 1).exists()):
            return None  # the total is lost: it is written again with the last window
        self._entries[window] = entry
        return entry

    def is_last(self, window: int, entry: WindowEntry) -> bool:
        """Whether no window follows."""
        return AFTER_MAX_TOKENS in entry.left_out or window + 1 == len(self.tokenized.plan.windows)

    def known_so_far(self) -> tuple[WindowEntry, int]:
        """What is known of the windows from the first on, as many as there are without a gap, as one; and how many
        these are."""
        if self.total is not None and self.total.everything is not None:
            return self.total.everything, self.total.windows
        entries: list[WindowEntry] = []
        while (entry := self.known_entry(len(entries))) is not None:
            entries.append(entry)
        return summed(entries), len(entries)

    def entry(self, window: int) -> WindowEntry:
        """What is known of a window, which is made now if it never was, and those before it."""
        first = window
        while first >= 0 and self.known_entry(first) is None:
            first -= 1
        for number in range(first + 1, window + 1):
            self.make(number)
        entry = self.known_entry(window)
        assert entry is not None, window
        return entry

    def entry_file(self, window: int) -> Path:
        return self.folder / f"{window:06}.json"

    def find(self, turn: int) -> tuple[int, int, int]:
        """The time through, the window and the place in it, of a turn."""
        if self.total is None:
            window = self.window_of(turn)
            if window is not None:
                return 0, window, turn - self.entry(window).first_row
        assert self.total is not None
        epoch, place = divmod(turn, self.total.rows)
        if self.max_epochs is not None and turn >= self.max_epochs * self.total.rows:
            raise DataError(used_up(self.tokenized, self.max_epochs))
        if epoch == 0:
            window = self.window_of(place)
            assert window is not None, turn
            return 0, window, place - self.entry(window).first_row
        windows, bounds = self.order(epoch)
        position = bisect_right(bounds, place) - 1
        return epoch, windows[position], place - bounds[position]

    def order(self, epoch: int) -> tuple[list[int], list[int]]:
        """The windows as they come in a further time through, and the rows before each."""
        assert self.total is not None
        if self.tokenized.plan.is_ordered:
            windows = list(range(self.total.windows))
            return windows, list(accumulate(self.rows_of(windows[:-1]), initial=0))
        if epoch not in self._orders:
            windows = (
                np.random.default_rng(seed_of(self.seed, "windows", epoch)).permutation(self.total.windows).tolist()
            )
            self._orders = {epoch: (windows, list(accumulate(self.rows_of(windows[:-1]), initial=0)))}
        return self._orders[epoch]

    def rows_of(self, windows: Sequence[int]) -> list[int]:
        """How many rows each of these windows has."""
        if self.table is not None:
            rows: list[int] = self.table["rows"][windows].tolist()
            return rows
        return [self.entry(window).rows for window in windows]

    def window_at(self, epoch: int, place: int) -> int:
        """The window that comes at a place in the order of a time through."""
        return place if epoch == 0 else self.order(epoch)[0][place]

    def place_of(self, epoch: int, window: int) -> int:
        return window if epoch == 0 else self.order(epoch)[0].index(window)

    def window_of(self, row: int) -> int | None:
        """The window of a row of the first time through, made now if it is not there; None after the last."""
        if self.total is not None and self.table is not None:
            window = int(np.searchsorted(self.table["first_row"], row, side="right")) - 1
            return window if row < self.total.rows else None
        window, step = self._near, 1
        if self.entry(window).first_row > row:
            window = 0
        if not self.entry(window).first_row <= row < self.entry(window).end:
            while (entry := self.known_entry(window + step)) is not None and entry.first_row <= row:
                window, step = window + step, 2 * step
            while step := step // 2:
                if (entry := self.known_entry(window + step)) is not None and entry.first_row <= row:
                    window += step
            while row >= self.entry(window).end:
                if self.total is not None and window + 1 >= self.total.windows:
                    return None
                window += 1
        self._near = window
        return window

    def keep(self, window: int, entry: WindowEntry, *, is_last: bool) -> None:
        """Write down what is known of a window, and after the last one what is known of all."""
        if self._sum is None:
            self._sum = self.known_so_far()[0]
        self._entries[window], self._sum = entry, summed([self._sum, entry])
        refuse_bad_windows(self.tokenized, self._sum, window)
        if is_last and not entry.end:
            raise DataError(all_held_out(self.tokenized, entry))
        write_once(self.entry_file(window), sealed(asdict(entry)))
        if is_last:
            entries = [known for number in range(window + 1) if (known := self.known_entry(number)) is not None]
            if len(entries) == window + 1:
                write_table(self.folder, entries)
            else:  # a checkpoint went on in an empty store
                write_total(self.folder, entry.end, window + 1)

    def state(self, turn: int) -> dict[str, Any]:
        """What a checkpoint keeps, so that a run goes on at turn `turn` where the store is empty: the window and what
        is in front of it."""
        _, window, _ = self.find(turn)
        return {"window": window, "entry": asdict(self.entry(window))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what a checkpoint kept.

        Raises:
            DataError: the store knows other documents there.
        """
        window, content = int(state["window"]), state["entry"]
        known = self.known_entry(window)
        if known is None:
            write_once(self.entry_file(window), sealed(content))
            self._near = window
        elif known.digest != content["digest"]:
            raise DataError(other_documents(self.tokenized))

    def marks(self) -> list[tuple[int, int]]:
        """Time through and window where readers have been; of each time through only the last ones stay."""
        return [(int(path.name[:6]), int(path.name[7:])) for path in (self.folder / MARKS).glob("*")]

    def forget_marks(self) -> None:
        rmtree(self.folder / MARKS, ignore_errors=True)

    def leave_mark(self, epoch: int, window: int) -> None:
        marks = self.folder / MARKS
        marks.mkdir(exist_ok=True)
        (marks / f"{epoch:06}-{window:06}").touch()
