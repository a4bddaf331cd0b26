"""Where the rows of a source are: in which window, whatever was read before, and also where most windows are not
there."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpt.data.mixture.order import seed_of
from cpt.data.selection import AFTER_MAX_TOKENS
from cpt.data.store.folder import hold, write_once
from cpt.data.store.tokenized import TokenizedSource
from cpt.data.windows.complaints import all_held_out, other_documents, refuse_bad_windows, used_up
from cpt.data.windows.entry import Total, WindowEntry, entry_of, summed
from cpt.data.windows.table import entry_in, fetch_table, open_table, read_total, write_table, write_total
from cpt.errors import DataError
from cpt.files import read_sealed, sealed

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
        self._has_asked = False  # a bucket
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
        if self._total is None and not self._has_asked:
            self._has_asked = True
            if fetch_table(self.folder):
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
        """Stays when the window is removed."""
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
        """Where a window comes in the order of a time through."""
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
        """Those of an earlier run."""
        rmtree(self.folder / MARKS, ignore_errors=True)

    def leave_mark(self, epoch: int, window: int) -> None:
        """Tell whoever removes windows that a reader is here."""
        marks = self.folder / MARKS
        marks.mkdir(exist_ok=True)
        (marks / f"{epoch:06}-{window:06}").touch()
