"""The run's loader: micro-batches by row number, made ahead of the step, and chunks read ahead of the rows."""

import atexit
import heapq
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from shutil import rmtree
from typing import Any, NamedTuple

import torch
from accelerate.utils.operations import recursively_apply
from torch.utils.data import DataLoader, Dataset, Sampler

from cpt.data.rows.mixture import MixtureRows, RowRange, shift_past_skipped
from cpt.data.rows.packing import Row, stack_rows
from cpt.data.rows.windows import MARKS, WindowedRows
from cpt.data.store.parallel import num_workers
from cpt.data.store.tokenized import Wanted, made
from cpt.errors import CptError

log = logging.getLogger("cpt")
MOST_REPLACEMENTS = 20  # of worker processes that died
MOST_AHEAD, MOST_BYTES_AHEAD = 16, 256 * 2**20  # micro-batches made before the model asks for them
POLL_SECONDS = 0.2
BEHIND = 1  # windows that stay behind the foremost reader, for slower ones


@dataclass(eq=False)
class RankSampler(Sampler[int]):
    """Global row numbers in the order in which one rank reads them."""

    micro_batch: int
    num_micro_batches: int
    rank: int
    world_size: int
    first_row: int
    left_out: Sequence[RowRange]
    begin_at: int = 0  # micro-batches that were taken before worker processes died

    def __iter__(self) -> Iterator[int]:
        for number in range(self.begin_at, self.num_micro_batches):
            first = self.first_row + (number * self.world_size + self.rank) * self.micro_batch
            yield from (shift_past_skipped(row, self.left_out) for row in range(first, first + self.micro_batch))

    def __len__(self) -> int:
        return self.num_micro_batches * self.micro_batch


class CPTDataLoader(DataLoader[Row]):
    """This rank's micro-batches of the rows from `first_row` to `rows_in_all`.

    Micro-batch m of rank r holds the rows first_row + (m * world_size + r) * micro_batch and following. To resume, set
    `first_row` to the rows trained so far: nothing is read again. Every rank has equally many micro-batches; the last
    rows are dropped where they are too few for one on each rank.

    Args:
        rows: indexable by global row number: `PreparedData.rows`.
        micro_batch: rows in a batch.
        rows_in_all: where the run ends, counted from its very beginning.
        left_out: ranges of rows that are not read; `first_row` and `rows_in_all` count only the others.
        complete: adds to a micro-batch what the model needs besides, in the thread or worker process that makes it.
        torch_loader_options: num_workers, pin_memory, collate_fn, ... of torch's DataLoader. Without workers a thread
            makes micro-batches ahead.
    """

    def __init__(
        self,
        rows: Dataset[Row],
        *,
        micro_batch: int,
        rows_in_all: int,
        rank: int = 0,
        world_size: int = 1,
        first_row: int = 0,
        left_out: Sequence[RowRange] = (),
        complete: Callable[[Row], Row] | None = None,
        **torch_loader_options: Any,
    ) -> None:
        rounds = max(0, rows_in_all - first_row) // (micro_batch * world_size)
        sampler = RankSampler(micro_batch, rounds, rank, world_size, first_row, tuple(left_out))
        # A loader without its own generator draws from the global one when it starts, and dropout would differ after a
        # resume.
        options = {"collate_fn": stack_rows, "generator": torch.Generator(), **torch_loader_options}
        self.collates_plainly = options["collate_fn"] is stack_rows
        if complete is not None:
            options["collate_fn"] = partial(completed, options["collate_fn"], complete)
        self.complete: Callable[[Row], Row] = complete or (lambda batch: batch)
        super().__init__(rows, batch_size=micro_batch, sampler=sampler, **options)
        self.rank_sampler = sampler
        self.waited_seconds = 0.0
        self.micro_batches_in_all = rows_in_all // (micro_batch * world_size)

    def __len__(self) -> int:
        """Micro-batches of the whole run, those before `first_row` too: the Trainer derives its steps from it."""
        return self.micro_batches_in_all

    def __iter__(self) -> Iterator[Row]:  # type: ignore[override]
        """The micro-batches; `waited_seconds` adds up the time that the model waited for them."""
        batches = self.by_workers() if self.num_workers else self.made_ahead()
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            self.waited_seconds += time.perf_counter() - asked
            if batch is None:
                return
            yield batch

    def by_workers(self) -> Iterator[Row]:
        """By torch. If workers die (usually out of memory), new ones continue with the next micro-batch."""
        taken = replaced = 0
        batches: Iterator[Row] | None = None
        while True:
            try:
                if batches is None:
                    # torch's handler of SIGCHLD raises wherever the main thread is, in a backward pass too.
                    is_main = threading.current_thread() is threading.main_thread()
                    before = signal.getsignal(signal.SIGCHLD) if is_main else None
                    batches = super().__iter__()
                    if is_main:
                        signal.signal(signal.SIGCHLD, before)
                batch = next(batches, None)
            except (RuntimeError, OSError, EOFError) as problem:
                is_lost = not str(problem).startswith("Caught ")  # which is an error in a row
                if isinstance(problem, RuntimeError):
                    is_lost = str(problem).startswith("DataLoader worker (pid")
                if not is_lost or replaced == MOST_REPLACEMENTS:
                    raise
                replaced += 1
                log.warning(
                    f"Worker processes of the data loader died and were replaced ({replaced} of {MOST_REPLACEMENTS}"
                    f" times): {problem}"
                )
                self.rank_sampler.begin_at = taken
                batches = self._iterator = None  # torch keeps persistent workers there
                continue
            if batch is None:
                self.rank_sampler.begin_at = 0
                return
            taken += 1
            yield batch

    def made_ahead(self) -> Iterator[Row]:
        """Micro-batches that a thread makes ahead; one, because several would share one interpreter."""
        pins = self.pin_memory and torch.accelerator.is_available()
        device = torch.accelerator.current_device_index() if pins else 0  # a thread has a current device of its own
        rows, stacks = self.dataset, self.collates_plainly

        def make(numbers: list[int]) -> Row:
            if type(rows) is MixtureRows and stacks:  # a subclass may give other rows, one by one
                batch = self.complete(rows.batch(numbers))
            else:
                batch = self.collate_fn([rows[number] for number in numbers])
            return recursively_apply(torch.Tensor.pin_memory, batch) if pins else batch  # type: ignore[no-any-return]

        def begin() -> None:
            if pins:
                torch.accelerator.set_device_index(device)

        ahead, waiting = 1, deque[Future[Row]]()
        with ThreadPoolExecutor(1, "data-prefetch", begin) as pool:
            try:
                for numbers in self.batch_sampler or ():
                    waiting.append(pool.submit(make, numbers))
                    if len(waiting) > ahead:
                        batch = waiting.popleft().result()
                        values = batch.values() if isinstance(batch, dict) else ()
                        num_bytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
                        ahead = max(2, min(MOST_AHEAD, MOST_BYTES_AHEAD // max(1, num_bytes)))
                        yield batch
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)


def completed(collate: Callable[[Any], Row], complete: Callable[[Row], Row], rows: Any) -> Row:
    return complete(collate(rows))


class Stop(NamedTuple):
    source: int
    epoch: int
    place: int  # the window's place in the order of this epoch
    window: int


class ReadAhead:
    """A thread that makes the windows of some sources in the order in which a run will need them.

    It works with objects of its own, so it shares only the store with readers.

    Args:
        shares: of the run's rows that come from each source; they decide only what is made first.
        first_turns: where the run begins in each source.
        disk_bytes: that the tokens of all these sources may take, about; None for as many as there are.
    """

    def __init__(
        self, rows: Sequence[WindowedRows], shares: Sequence[float], first_turns: Sequence[int], disk_bytes: int | None
    ) -> None:
        self.rows = [WindowedRows(*one.__reduce__()[1]) for one in rows]
        self.shares, self.first_turns, self.disk_bytes = shares, first_turns, disk_bytes
        self.unwanted = threading.Event()
        self.begun: list[Stop] = []  # windows with missing shards
        self.needed: list[Stop] = []  # from the readers on, as far as the thread is
        self.present = {  # bytes of the windows that are there, by source and window
            (number, window): one.num_bytes(window)
            for number, one in enumerate(self.rows)
            for window in range(len(one.tokenized.plan.windows) if disk_bytes is not None else 0)
            if one.window_folder(window).exists()
        }
        for one in self.rows:
            rmtree(one.folder / MARKS, ignore_errors=True)
        self.thread = threading.Thread(target=self.run, name="data-read-ahead", daemon=True)

    def start(self) -> None:
        atexit.register(self.stop)
        self.thread.start()

    def stop(self) -> None:
        """End the thread and its worker processes; what they leave half done is not taken for complete."""
        atexit.unregister(self.stop)
        self.unwanted.set()
        if self.thread.is_alive():
            self.thread.join()

    def run(self) -> None:
        """The thread's work. An error ends it: the reader who needs the window meets the same one and raises it."""
        cores, sources = num_workers(), [rows.tokenized for rows in self.rows]
        shards = made(self.wanted(), cores and max(1, cores - 1), sources)  # one core is left to the run itself
        try:
            for _ in shards:
                self.close_windows()
                if self.unwanted.is_set():
                    return
            self.close_windows()
            for source in sources if self.disk_bytes is None else []:
                if not self.unwanted.is_set() and not source.missing(range(len(source.plan.shards))):
                    source.finish()
        except CptError as problem:
            log.warning(f"Reading ahead ended: {problem}")
        finally:
            shards.close()

    def wanted(self) -> Iterator[Wanted]:
        """Shards that are not there, window by window, as they will be needed; waits while the disk is full."""
        for stop in self.stops():
            rows = self.rows[stop.source]
            if self.is_passed(stop):  # a reader was faster and made it itself
                if rows.window_folder(stop.window).exists():
                    self.present[stop.source, stop.window] = rows.num_bytes(stop.window)
                self.has_room()
                continue
            self.needed.append(stop)
            self.begun.append(stop)
            for shard in rows.tokenized.missing(rows.tokenized.plan.windows[stop.window]):
                self.wait_until(self.has_room)
                if self.unwanted.is_set():
                    return
                yield rows.tokenized, shard
            if self.unwanted.is_set():
                return

    def stops(self) -> Iterator[Stop]:
        """The windows as a run comes to them, from where it begins; in all epochs if windows are removed."""
        upcoming: list[tuple[float, Stop]] = []  # rows of the run before it, estimated by files' sizes
        for number, turn in enumerate(self.first_turns):
            epoch, window, _ = self.rows[number].find(turn)
            heapq.heappush(upcoming, (0.0, Stop(number, epoch, self.rows[number].place_of(epoch, window), window)))
        while upcoming:
            position, stop = heapq.heappop(upcoming)
            yield stop
            rows, share = self.rows[stop.source], max(self.shares[stop.source], 1e-9)
            position += self.file_bytes((stop.source, stop.window)) / share
            epoch, place = stop.epoch, stop.place + 1
            if place == (rows.total.windows if rows.total else len(rows.tokenized.plan.windows)):
                if self.disk_bytes is None:
                    continue
                epoch, place = epoch + 1, 0
                self.wait_until(lambda rows=rows: rows.total is not None)  # type: ignore[misc]
            if not self.unwanted.is_set():
                heapq.heappush(upcoming, (position, Stop(stop.source, epoch, place, rows.window_at(epoch, place))))

    def close_windows(self) -> None:
        """Pack the windows whose shards are all there, in the order in which they were begun."""
        while self.begun:
            stop = self.begun[0]
            rows = self.rows[stop.source]
            if rows.tokenized.missing(rows.tokenized.plan.windows[stop.window]):
                return
            rows.prepare(stop.window)
            self.present[stop.source, stop.window] = 0 if self.disk_bytes is None else rows.num_bytes(stop.window)
            self.begun.pop(0)

    def has_room(self) -> bool:
        """Whether the windows that were begun have room, after removing consumed windows as far as that is needed."""
        if self.disk_bytes is None:
            return True
        self.close_windows()
        self.needed = [stop for stop in self.needed if not self.is_passed(stop)]
        needed = {(stop.source, stop.window) for stop in self.needed}
        used = sum(self.present.values())
        begun = {(stop.source, stop.window) for stop in self.begun} - self.present.keys()
        used += round(sum(map(self.file_bytes, begun)) * used / max(1, sum(map(self.file_bytes, self.present))))
        for source, window in list(self.present):
            if used > self.disk_bytes and (source, window) not in needed:
                self.rows[source].remove(window)
                used -= self.present.pop((source, window))
        return used <= self.disk_bytes

    def is_passed(self, stop: Stop) -> bool:
        """Whether all readers have left a window, by the marks of the foremost."""
        if self.disk_bytes is None:
            return False
        rows = self.rows[stop.source]
        foremost = max(((epoch, rows.place_of(epoch, window)) for epoch, window in rows.marks()), default=(0, 0))
        return (stop.epoch, stop.place + BEHIND) < foremost

    def file_bytes(self, place: tuple[int, int]) -> int:
        source, window = place
        plan = self.rows[source].tokenized.plan
        return sum(plan.num_bytes[shard] for shard in plan.windows[window])

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not self.unwanted.is_set() and not is_so():
            time.sleep(POLL_SECONDS)
