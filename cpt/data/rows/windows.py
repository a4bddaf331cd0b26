"""The rows of a source, window by window: each is packed and shuffled by itself, shortly before it is needed.

What is known of a window stays in a small file after its tokens are removed. So any place of the source is found at
once: the file of window w says how many rows are before it."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from shutil import rmtree
from typing import Any

from xxhash import xxh3_128_hexdigest

from cpt.cache import has_sound_files, key_of, publish_derived, size_of
from cpt.data.examples.segments import fitting
from cpt.data.rows.packing import FORMAT
from cpt.data.rows.rows import Layout, PackedRows
from cpt.data.rows.selection import Chosen, Selection, part_by_score
from cpt.data.rows.window_index import START, WindowEntry, WindowIndex, added, by_power_of_two, other_documents
from cpt.data.store.order import seed_of, shuffled
from cpt.data.store.token_files import StoredDocuments
from cpt.data.store.tokenized import TokenizedSource
from cpt.errors import DataError, RecipeError
from cpt.recipe.schema import Budget, Data

WINDOWS_ON_DISK = 4  # of each source: read, made next, kept for slower readers, and a rest


def why_all(data: Data, budget: Budget | None) -> str | None:
    """The key that needs the whole of every source before the first row."""
    if data.deduplicate is not None:
        return "data.deduplicate"
    if data.temperature is not None:
        return "data.temperature"
    return "budget.epochs" if budget is not None and budget.epochs is not None else None


def refuse_small_disk(
    data: Data, budget: Budget | None, sources: Sequence[TokenizedSource], *, needs_all: bool
) -> None:
    """Check that `data.disk_bytes` holds some windows of each source, and that nothing needs all of one."""
    large = [source for source in sources if source.plan.is_streamed]
    if data.disk_bytes is None or not large:
        return
    if needs_all:
        reason = why_all(data, budget)
        what = f"`{reason}` needs" if reason else "preparing needs"
        raise RecipeError(f"`data.disk_bytes`: {what} the whole of each source on the disk. Remove one of the two.")
    least = WINDOWS_ON_DISK * len(large) * data.window_bytes
    if data.disk_bytes < least:
        raise RecipeError(
            f"`data.disk_bytes` is {data.disk_bytes:,}, but {len(large)} source(s) in windows of"
            f" {data.window_bytes:,} bytes need {least:,}. Raise it, or lower `data.window_bytes`."
        )


# --- rows ---


OPENED = 2  # windows of a source that a process keeps open


@dataclass(frozen=True)
class Here:
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


class WindowedRows(WindowIndex):
    """The rows of one source, by turn and by number.

    Row numbers count through the windows in the order of the first time through; in each further time the windows come
    in another order, and the pieces of a window in other rows of it.

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
        self.selection, self.layout, self.cache_dir, self.is_bounded = selection, layout, cache_dir, is_bounded
        content = {
            "format": FORMAT,
            "tokens": tokenized.name,
            "plan": tokenized.plan.windows,
            "seed": seed,
            **layout.content(),
        }
        super().__init__(tokenized, cache_dir / "rows" / key_of({**content, **selection.content()}), seed, max_epochs)
        self._lock = threading.RLock()  # micro-batches may be made by several threads
        self._opened: OrderedDict[int, PackedRows] = OrderedDict()
        self._here: Here | None = None
        self._at: tuple[int, int] | None = None  # time through and window of the row read last

    def __reduce__(self) -> tuple[Any, ...]:
        """Worker processes open the files themselves."""
        values = (
            self.tokenized,
            self.selection,
            self.layout,
            self.seed,
            self.cache_dir,
            self.max_epochs,
            self.is_bounded,
        )
        return reopen, values

    @property
    def fingerprint(self) -> str:
        """Of the documents and how they are packed; moving files changes nothing.

        Of several windows: of the first, of the plan and of the rules by which documents are chosen; each further
        window is held against what a checkpoint knows of it.
        """
        plan = self.tokenized.plan
        what = {"format": FORMAT, "documents": self.entry(0).own_digest, "seed": self.seed}
        return key_of(
            {**what, "plan": "", "rules": {}}
            if plan.is_whole
            else {**what, "plan": plan.fingerprint, "rules": self.selection.content()}
        )

    @property
    def filled(self) -> float:
        """Share of `sequence_length` that tokens fill, in the first window that has rows: known before all is read,
        and never another.

        An example that is a row by itself counts as one that fills it: shares are then of examples.
        """
        if self.layout.is_one_a_row:
            return 1.0
        entry = next(entry for window in count() if (entry := self.entry(window)).rows)
        return entry.tokens_in_rows / (entry.rows * self.layout.sequence_length)

    def begin(self, *, all_windows: bool) -> None:
        """Make the first window, and those after it as long as there is no row, or all of them."""
        window = 0
        while self.total is None and (all_windows or self.tokenized.plan.is_ordered or not self.entry(window).rows):
            self.entry(window)
            if all_windows and self.is_bounded and window:
                self.remove(window)  # only what is known of it was asked for
            window += 1

    @property
    def is_complete(self) -> bool:
        """Whether every window was made and none has to be made again."""
        return self.total is not None and self.tokenized.description is not None

    def window_folder(self, window: int) -> Path:
        """How the window is packed; complete or not there."""
        return self.folder / f"{window:06}"

    def place(self, turn: int, seed: str) -> tuple[int, int]:
        """How often the source was gone through before turn `turn`, and the row whose turn it is, in an order drawn
        from the seed."""
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

    def prepare(self, window: int) -> None:
        """Make a window that is not there, or is damaged."""
        entry = self.entry(window)
        if entry.rows and not has_sound_files(self.window_folder(window)):
            self.make(window)

    def window(self, window: int) -> PackedRows:
        if window not in self._opened:
            self.prepare(window)
            for rows in self._opened.values():  # where reading is over but for slower threads
                rows.documents.rest()
            documents = self.tokenized.documents(self.tokenized.plan.windows[window])
            self._opened[window] = self.layout.open(documents, self.window_folder(window))
            if len(self._opened) > OPENED:
                self._opened.popitem(last=False)
        self._opened.move_to_end(window)
        return self._opened[window]

    def make(self, window: int) -> None:
        """Pack a window, all before which are known, and say what is in it."""
        known = self.known_entry(window)
        before = START if window == 0 else self.entry(window - 1) if known is None else None
        tokens_before = (
            before.tokens_before + before.tokens
            if before is not None
            else known.tokens_before
            if known is not None
            else 0
        )
        documents, chosen = self.choose(window, tokens_before)
        numbers, lengths, read, unfit = fitting(
            documents, chosen.documents, self.layout.form, self.layout.sequence_length
        )
        starts = documents.offsets[numbers]
        own_digest = key_of({"documents": documents.digest, "starts": xxh3_128_hexdigest(starts.tobytes())})
        if known is not None and known.own_digest != own_digest:
            raise DataError(other_documents(self.tokenized))
        positions = tokens_in_rows = rows = 0
        if len(starts):
            folder = publish_derived(self.window_folder(window), self.layout.packer(starts, lengths, self.seed))
            packed = self.layout.open(documents, folder)
            positions, tokens_in_rows, rows = packed.num_positions, packed.num_tokens, len(packed)
        if known is not None or before is None:
            return
        parts = [part.description for part in documents.parts] if self.is_new(window) else []
        entry = WindowEntry(
            first_row=before.end,
            rows=rows,
            tokens_before=tokens_before,
            tokens=int(read.sum()),
            tokens_in_rows=tokens_in_rows,
            positions=positions,
            documents=len(starts),
            held_out=chosen.held_out,
            left_out=added([*(part.dropped for part in parts), chosen.left_out, unfit]),
            bad_rows=added([part.bad_rows for part in parts]),
            lengths=by_power_of_two(read),
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
        documents = self.tokenized.documents(shards)
        for part in documents.parts if self.is_new(window) else []:
            part.sync()
        if not self.tokenized.plan.is_ordered:
            return documents, self.selection.choose(documents, shards, tokens_before)
        chosen = self.selection.choose(documents, shards, 0)
        mine = part_by_score(documents, chosen.documents, window, self.layout.sequence_length)
        if not self.is_new(window):
            return documents, Chosen(mine, 0, {}, is_limit_reached=False)
        return documents, replace(chosen, documents=mine, is_limit_reached=False)

    def remove(self, window: int) -> None:
        """Remove a window's tokens and how they are packed; what is known of it stays."""
        self._opened.pop(window, None)
        rmtree(self.window_folder(window), ignore_errors=True)
        for folder in self.own_folders(window):
            rmtree(folder, ignore_errors=True)

    def num_bytes(self, window: int) -> int:
        return sum(size_of(folder) for folder in [self.window_folder(window), *self.own_folders(window)])

    def own_folders(self, window: int) -> list[Path]:
        """Of a window's shards, without those that the held-out set is read from."""
        kept = set(self.tokenized.plan.held_out) if self.selection.held_out_share is not None else set()
        return [
            self.tokenized.shard_folder(shard) for shard in self.tokenized.plan.windows[window] if shard not in kept
        ]


def reopen(*values: Any) -> WindowedRows:
    """In another process, or for another thread."""
    *positional, max_epochs, is_bounded = values
    return WindowedRows(*positional, max_epochs=max_epochs, is_bounded=is_bounded)
