"""The rows of a source, window by window: each is packed and shuffled by itself, when it is needed or a little before.

What is known of a window once it was made stays in a small file, also when its tokens are removed to save disk. So any place of the source
is found at once, whatever was read before: the file of window w says how many rows there are in front of it.
"""

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128_hexdigest

from cpt.data.order import seed_of, shuffled
from cpt.data.packing import FORMAT, fill_packing
from cpt.data.plan import ORDERED_PARTS
from cpt.data.rows import PackedRows, kind_of_rows
from cpt.data.selection import Chosen, Selection
from cpt.data.store import hold, key_of, publish_once, size_of, write_once
from cpt.data.token_files import StoredDocuments
from cpt.data.tokenized import TokenizedSource
from cpt.data.window_complaints import all_held_out, other_documents, refuse_bad_windows, used_up
from cpt.data.window_entry import START, Total, WindowEntry, added, by_power_of_two, entry_of
from cpt.errors import DataError

OPENED = 2  # windows of a source that a process keeps open
ROWS_OF_A_PART = 8  # at least, of a source that is read by a score
TOTAL = "total.json"
MARKS = "readers"


@dataclass(frozen=True)
class Layout:
    """How documents are laid out in rows."""

    sequence_length: int
    packing: str
    stride: int | None
    pad: int


@dataclass(frozen=True)
class Here:
    """The window that is being read."""

    first_turn: int
    end_turn: int
    order: str
    """The seed that the order was asked for with."""
    seed: int
    """Of the order inside the window."""
    epoch: int
    first_row: int
    """Of the window, among the rows of the source."""
    rows: PackedRows


class WindowedRows:
    """The rows of one source, by turn and by number.

    Row numbers count through the windows in the order of the first time through; in each further time the windows come in another order,
    and the pieces of a window in other rows of it.

    Args:
        max_epochs: how often the source may be gone through.
        is_bounded: windows are removed behind the readers, who therefore leave marks of where they are.
    """

    def __init__(
        self,
        tokenized: TokenizedSource,
        selection: Selection,
        layout: Layout,
        seed: int,
        cache_dir: Path,
        *,
        max_epochs: float | None = None,
        is_bounded: bool = False,
    ) -> None:
        self.tokenized, self.selection, self.layout, self.seed = tokenized, selection, layout, seed
        self.cache_dir, self.max_epochs, self.is_bounded = cache_dir, max_epochs, is_bounded
        content = {"format": FORMAT, "tokens": tokenized.name, "plan": tokenized.plan.windows, "seed": seed, **asdict(layout)}
        self.folder = cache_dir / "rows" / key_of({**content, **selection.content()})
        hold(self.folder, self)
        self._lock = threading.RLock()  # micro-batches may be made by several threads
        self._entries: dict[int, WindowEntry] = {}
        self._opened: OrderedDict[int, PackedRows] = OrderedDict()
        self._near = 0  # a window whose entry is known, to search from
        self._total: Total | None = None
        self._orders: dict[int, tuple[list[int], list[int]]] = {}
        self._here: Here | None = None
        self._at: tuple[int, int] | None = None  # time through and window of the row read last

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes open the files themselves."""
        values = (self.tokenized, self.selection, self.layout, self.seed, self.cache_dir, self.max_epochs, self.is_bounded)
        return reopen, values

    @property
    def fingerprint(self) -> str:
        """Of the documents and how they are packed; moving files changes nothing.

        Of several windows: of the first, of the plan and of the rules by which documents are chosen; each further window is held against
        what a checkpoint knows of it.
        """
        plan = self.tokenized.plan
        what = {"format": FORMAT, "documents": self.entry(0).own_digest, "seed": self.seed}
        return key_of(
            {**what, "plan": "", "rules": {}} if plan.is_whole else {**what, "plan": plan.fingerprint, "rules": self.selection.content()}
        )

    @property
    def filled(self) -> float:
        """Share of `sequence_length` that tokens fill, in the first window that has rows: known before all is read, and never another."""
        entry = next(entry for window in count() if (entry := self.entry(window)).rows)
        return entry.tokens_in_rows / (entry.rows * self.layout.sequence_length)

    def begin(self, *, all_windows: bool) -> None:
        """Make the first window, and those after it as long as there is no row, or all of them.

        Raises:
            DataError: nothing is left to train on.
        """
        window = 0
        while self.total is None and (all_windows or self.tokenized.plan.is_ordered or not self.entry(window).rows):
            self.entry(window)
            window += 1

    @property
    def is_complete(self) -> bool:
        """Whether every window was made and none has to be made again."""
        return self.total is not None and self.tokenized.description is not None

    @property
    def total(self) -> "Total | None":
        """What one time through is, once its last window was made."""
        if self._total is None:
            with suppress(OSError):
                self._total = Total(**json.loads((self.folder / TOTAL).read_text()))
        return self._total

    def known_entry(self, window: int) -> WindowEntry | None:
        """What is known of a window; None where it was never made."""
        if window not in self._entries:
            try:
                self._entries[window] = entry_of(json.loads(self.entry_file(window).read_text()))
            except OSError:
                return None
        return self._entries[window]

    def known_entries(self) -> list[WindowEntry]:
        """From the first window on, as many as there are without a gap."""
        entries: list[WindowEntry] = []
        while (entry := self.known_entry(len(entries))) is not None:
            entries.append(entry)
        return entries

    def entry(self, window: int) -> WindowEntry:
        """What is known of a window, which is made now if it never was, and those before it."""
        first = window
        while first >= 0 and self.known_entry(first) is None:
            first -= 1
        for number in range(first + 1, window + 1):
            self.make(number)
        return self._entries[window]

    def entry_file(self, window: int) -> Path:
        """Stays when the window is removed."""
        return self.folder / f"{window:06}.json"

    def window_folder(self, window: int) -> Path:
        """How the window is packed; complete or not there."""
        return self.folder / f"{window:06}"

    def place(self, turn: int, seed: str) -> tuple[int, int]:
        """How often the source was gone through before turn `turn`, and the row whose turn it is, in an order drawn from the seed.

        Raises:
            DataError: the source is used up and may not be repeated, or a window cannot be made.
        """
        here = self.come_to(turn, seed)
        return here.epoch, here.first_row + shuffled(turn - here.first_turn, len(here.rows), here.seed)

    def row_at(self, turn: int, seed: str) -> tuple[PackedRows, int, int]:
        """The row whose turn it is: the rows of its window, its number among them, and the time through the source."""
        here = self.come_to(turn, seed)
        return here.rows, shuffled(turn - here.first_turn, len(here.rows), here.seed), here.epoch

    def come_to(self, turn: int, seed: str) -> "Here":
        """The window of a turn; mostly that of the turn before."""
        here = self._here
        if here is None or not here.first_turn <= turn < here.end_turn or here.order != seed:
            with self._lock:
                here = self._here = self.open_at(turn, seed)
        return here

    def open_at(self, turn: int, seed: str) -> "Here":
        """Open the window of a turn, and leave a mark there where windows are removed behind the readers."""
        epoch, window, place = self.find(turn)
        if self.is_bounded and (epoch, window) != self._at:
            self._at = epoch, window
            self.leave_mark(epoch, window)
        rows, first_row = self.window(window), self.entry(window).first_row
        number = seed_of(seed, epoch) if self.tokenized.plan.is_whole else seed_of(seed, epoch, window)
        return Here(turn - place, turn - place + len(rows), seed, number, epoch, first_row, rows)

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
            return windows, list(accumulate((self.entry(window).rows for window in windows[:-1]), initial=0))
        if epoch not in self._orders:
            windows = np.random.default_rng(seed_of(self.seed, "windows", epoch)).permutation(self.total.windows).tolist()
            rows = [self.entry(window).rows for window in windows]
            self._orders = {epoch: (windows, list(accumulate(rows[:-1], initial=0)))}
        return self._orders[epoch]

    def window_at(self, epoch: int, place: int) -> int:
        """The window that comes at a place in the order of a time through."""
        return place if epoch == 0 else self.order(epoch)[0][place]

    def place_of(self, epoch: int, window: int) -> int:
        """Where a window comes in the order of a time through."""
        return window if epoch == 0 else self.order(epoch)[0].index(window)

    def window_of(self, row: int) -> int | None:
        """The window of a row of the first time through, made now if it is not there; None after the last."""
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

    def prepare(self, window: int) -> None:
        """Make a window that is not there."""
        entry = self.entry(window)
        if entry.rows and not self.window_folder(window).exists():
            self.make(window)

    def window(self, window: int) -> PackedRows:
        """The rows of a window."""
        if window not in self._opened:
            self.prepare(window)
            for rows in self._opened.values():  # where reading is over but for slower threads
                rows.documents.rest()
            documents = self.tokenized.documents(self.tokenized.plan.windows[window])
            layout = self.layout
            rows = kind_of_rows(layout.packing)(documents, self.window_folder(window), layout.sequence_length, layout.pad)
            self._opened[window] = rows
            if len(self._opened) > OPENED:
                self._opened.popitem(last=False)
        self._opened.move_to_end(window)
        return self._opened[window]

    def make(self, window: int) -> None:
        """Pack a window, all before which are known, and say what is in it.

        Raises:
            DataError: a row is bad, or the documents are not what they were when the window was made first.
        """
        known = self.known_entry(window)
        before = START if window == 0 else self.entry(window - 1) if known is None else None
        tokens_before = before.tokens_before + before.tokens if before is not None else known.tokens_before if known is not None else 0
        documents, chosen = self.choose(window, tokens_before)
        starts, lengths = documents.offsets[chosen.documents], np.diff(documents.offsets)[chosen.documents]
        own_digest = key_of({"documents": documents.digest, "starts": xxh3_128_hexdigest(starts.tobytes())})
        if known is not None and known.own_digest != own_digest:
            raise DataError(other_documents(self.tokenized))
        positions = tokens_in_rows = rows = 0
        if len(starts):
            layout = self.layout
            pack = partial(fill_packing, starts, lengths, layout.sequence_length, layout.packing, self.seed, layout.stride)
            folder = publish_once(self.window_folder(window), pack)
            packed = kind_of_rows(layout.packing)(documents, folder, layout.sequence_length, layout.pad)
            positions, tokens_in_rows, rows = packed.num_positions, packed.num_tokens, len(packed)
        if known is not None or before is None:
            return
        parts = [part.description for part in documents.parts] if self.is_new(window) else []
        entry = WindowEntry(
            first_row=before.end,
            rows=rows,
            tokens_before=tokens_before,
            tokens=int(lengths.sum()),
            tokens_in_rows=tokens_in_rows,
            positions=positions,
            documents=len(starts),
            held_out=chosen.held_out,
            left_out=added([*(part.dropped for part in parts), chosen.left_out]),
            bad_rows=added([part.bad_rows for part in parts]),
            lengths=by_power_of_two(lengths),
            longest=max((part.longest for part in parts), key=lambda place: place[1], default=("", 0)),
            own_digest=own_digest,
            digest=key_of({"before": before.digest, "own": own_digest}),
        )
        self.keep(window, entry, is_last=chosen.is_limit_reached or window + 1 == len(self.tokenized.plan.windows))

    def is_new(self, window: int) -> bool:
        """Whether its shards were in no window before; all parts of an ordered source are taken from the same ones."""
        return window == 0 or not self.tokenized.plan.is_ordered

    def choose(self, window: int, tokens_before: int) -> tuple[StoredDocuments, Chosen]:
        """The documents of a window's shards, and which of them are trained on in this window."""
        shards = self.tokenized.plan.windows[window]
        documents = self.tokenized.documents(shards, verified=self.is_new(window))
        for part in documents.parts if self.is_new(window) else []:
            part.sync()
        if not self.tokenized.plan.is_ordered:
            return documents, self.selection.choose(documents, shards, tokens_before)
        chosen = self.selection.choose(documents, shards, 0)
        mine = part_by_score(documents, chosen.documents, window, self.layout.sequence_length)
        if not self.is_new(window):
            return documents, Chosen(mine, 0, {}, is_limit_reached=False)
        return documents, replace(chosen, documents=mine, is_limit_reached=False)

    def keep(self, window: int, entry: WindowEntry, *, is_last: bool) -> None:
        """Write down what is known of a window, and after the last one what is known of all."""
        self._entries[window] = entry
        refuse_bad_windows(self.tokenized, [self._entries[number] for number in sorted(self._entries)], window)
        if is_last and not entry.end:
            raise DataError(all_held_out(self.tokenized, entry))
        write_once(self.entry_file(window), json.dumps(asdict(entry)))
        if is_last:
            write_once(self.folder / TOTAL, json.dumps({"rows": entry.end, "windows": window + 1}))

    def state(self, turn: int) -> dict[str, Any]:
        """What a checkpoint keeps, so that a run goes on at turn `turn` where the store is empty: the window and what is in front of it."""
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
            write_once(self.entry_file(window), json.dumps(content))
            self._near = window
        elif known.digest != content["digest"]:
            raise DataError(other_documents(self.tokenized))

    def remove(self, window: int) -> None:
        """Remove a window's tokens and how they are packed; what is known of it stays."""
        self._opened.pop(window, None)
        rmtree(self.window_folder(window), ignore_errors=True)
        for folder in self.own_folders(window):
            rmtree(folder, ignore_errors=True)

    def num_bytes(self, window: int) -> int:
        """That a window takes on the disk."""
        return sum(size_of(folder) for folder in [self.window_folder(window), *self.own_folders(window)])

    def own_folders(self, window: int) -> list[Path]:
        """Of a window's shards, without those that the held-out set is read from."""
        kept = set(self.tokenized.plan.held_out) if self.selection.held_out_share is not None else set()
        return [self.tokenized.shard_folder(shard) for shard in self.tokenized.plan.windows[window] if shard not in kept]

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


def part_by_score(documents: StoredDocuments, chosen: NDArray[np.int64], part: int, sequence_length: int) -> NDArray[np.int64]:
    """A part of the chosen documents, by their score: equally many tokens each; fewer parts than there may be where each would be tiny."""
    order = chosen[np.argsort(documents.scores[chosen], kind="stable")]
    ends = np.diff(documents.offsets)[order].cumsum()
    parts = int(np.clip(ends[-1] // (ROWS_OF_A_PART * sequence_length), 1, ORDERED_PARTS)) if len(order) else 1
    bounds = np.searchsorted(ends, [ends[-1] * part / parts, ends[-1] * (part + 1) / parts], "left") if len(order) else [0, 0]
    last = len(order) if part + 1 == parts else bounds[1]
    return order[bounds[0] : last] if part < parts else order[:0]


def reopen(*values: Any) -> WindowedRows:
    """In another process, or for another thread."""
    *positional, max_epochs, is_bounded = values
    return WindowedRows(*positional, max_epochs=max_epochs, is_bounded=is_bounded)
