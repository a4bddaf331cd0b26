"""The data loader of a run: micro-batches by row number, prepared ahead of the step, and chunks ahead of the rows."""

import atexit
import errno
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from accelerate.utils.operations import recursively_apply
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from cpt.data.rows.chunks import ChunkedRows
from cpt.data.rows.mixture import MixtureRows, RowRange, shift_past_skipped
from cpt.data.rows.packing import Row, stack_rows
from cpt.data.store.parallel import num_workers
from cpt.data.store.tokenized import SourceShard, make_in_order
from cpt.distributed import report_fallback
from cpt.errors import CptError

log = logging.getLogger("cpt")
MOST_REPLACEMENTS = 20  # replacements of dead worker processes before giving up
FULL_SHARED_MEMORY = (
    "/dev/shm is too small for the batches of worker processes."
    " In a container: docker run --shm-size=8g, or --ipc=host"
)
MOST_AHEAD = 16  # micro-batches prepared in advance
MOST_BYTES_AHEAD = 256 * 2**20


@dataclass(eq=False)
class RankSampler(Sampler[int]):
    """Yields global row numbers in the order in which one rank reads them."""

    micro_batch: int
    num_micro_batches: int
    rank: int
    world_size: int
    first_row: int
    left_out: Sequence[RowRange]
    begin_at: int = 0  # micro-batches consumed before workers were replaced

    def __iter__(self) -> Iterator[int]:
        for number in range(self.begin_at, self.num_micro_batches):
            first = self.first_row + (number * self.world_size + self.rank) * self.micro_batch
            for row in range(first, first + self.micro_batch):
                yield shift_past_skipped(row, self.left_out)

    def __len__(self) -> int:
        return self.num_micro_batches * self.micro_batch


class CPTDataLoader(DataLoader[Row]):
    """This rank's micro-batches of the rows from `first_row` to `rows_in_all`.

    Micro-batch m of rank r contains `micro_batch` rows from first_row + (m * world_size + r) * micro_batch on. To
    resume, set `first_row` to the rows trained so far; no row is read twice. Every rank has the same number of
    micro-batches; the last rows are dropped if they are too few for one micro-batch on each rank.

    Args:
        rows: indexable by global row number: `PreparedData.rows`.
        micro_batch: rows in a batch.
        rows_in_all: the end of the run, counted from row 0.
        left_out: ranges of skipped rows; `first_row` and `rows_in_all` do not count them.
        complete: adds further model inputs to a micro-batch, in the thread or worker process that makes it.
        torch_loader_options: num_workers, pin_memory, collate_fn, ... of torch's DataLoader. With 0 workers a thread
            prepares micro-batches in advance.
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
        # A loader without a generator draws from the global one when it starts, which would change dropout after a
        # resume.
        options = {"collate_fn": stack_rows, "generator": torch.Generator(), **torch_loader_options}
        self.collates_plainly = options["collate_fn"] is stack_rows
        if complete is not None:
            options["collate_fn"] = partial(completed, options["collate_fn"], complete)
        if options.get("num_workers"):
            options["collate_fn"] = partial(shared, options["collate_fn"])
        self.complete: Callable[[Row], Row] = complete or (lambda batch: batch)
        super().__init__(rows, batch_size=micro_batch, sampler=sampler, **options)
        self.rank_sampler = sampler
        self.waited_seconds = 0.0
        self.micro_batches_in_all = rows_in_all // (micro_batch * world_size)

    def __len__(self) -> int:
        """Micro-batches of the whole run, with those before `first_row`: the Trainer computes its steps from it."""
        return self.micro_batches_in_all

    def __iter__(self) -> Iterator[Row]:  # type: ignore[override]
        """Yield micro-batches; `waited_seconds` adds up the time that the model waited for them."""
        batches = self.by_workers() if self.num_workers else self.made_ahead()
        while True:
            begin = time.perf_counter()
            batch = next(batches, None)
            self.waited_seconds += time.perf_counter() - begin
            if batch is None:
                return
            yield batch

    def by_workers(self) -> Iterator[Row]:
        """Load with torch's workers. Workers that die (usually out of memory) are replaced; without enough shared
        memory for their batches, this process loads the others."""
        num_read = 0
        replacements = 0
        batches: Iterator[Row] | None = None
        while True:
            try:
                if batches is None:
                    # torch's SIGCHLD handler raises wherever the main thread is, even in a backward pass.
                    is_main = threading.current_thread() is threading.main_thread()
                    handler = signal.getsignal(signal.SIGCHLD) if is_main else None
                    batches = super().__iter__()
                    if is_main:
                        signal.signal(signal.SIGCHLD, handler)
                batch = next(batches, None)
            except CptError as problem:  # torch puts the worker's traceback before the message
                kind = type(problem)
                message = str(problem).rpartition(f"\n{kind.__module__}.{kind.__name__}: ")[2]
                raise kind(message.rstrip()) from problem
            except (RuntimeError, OSError, EOFError) as problem:
                if is_out_of_shared_memory(problem):
                    break
                if not is_lost_worker(problem) or replacements == MOST_REPLACEMENTS:
                    raise
                replacements += 1
                log.warning(
                    "Worker processes of the data loader died and were replaced"
                    f" ({replacements} of {MOST_REPLACEMENTS} times): {problem}"
                )
                self.rank_sampler.begin_at = num_read
                batches = self._iterator = None  # holds torch's persistent workers
                continue
            if batch is None:
                self.rank_sampler.begin_at = 0
                return
            num_read += 1
            yield batch
        report_fallback("training.dataloader_num_workers", 0, FULL_SHARED_MEMORY)
        self.num_workers = 0
        self.rank_sampler.begin_at = num_read
        batches = self._iterator = None
        yield from self.made_ahead()
        self.rank_sampler.begin_at = 0

    def made_ahead(self) -> Iterator[Row]:
        """Prepare micro-batches in one thread; several would compete for the interpreter."""
        pins = self.pin_memory and torch.accelerator.is_available()
        set_device = None
        if pins:  # the current device is per thread
            device = torch.accelerator.current_device_index()
            set_device = partial(torch.accelerator.set_device_index, device)
        rows = self.dataset
        # A subclass may change single rows.
        writes_batches = type(rows) is MixtureRows and self.collates_plainly

        def make(numbers: list[int]) -> Row:
            if writes_batches:
                batch = self.complete(cast(MixtureRows, rows).batch(numbers))
            else:
                batch = self.collate_fn([rows[number] for number in numbers])
            if pins:
                return cast(Row, recursively_apply(torch.Tensor.pin_memory, batch))
            return batch

        most_waiting = 1
        waiting = deque[Future[Row]]()
        with ThreadPoolExecutor(1, "data-prefetch", set_device) as pool:
            try:
                for numbers in self.batch_sampler or ():
                    waiting.append(pool.submit(make, numbers))
                    if len(waiting) > most_waiting:
                        batch = waiting.popleft().result()
                        most_in_memory = MOST_BYTES_AHEAD // max(1, bytes_of(batch))
                        most_waiting = max(2, min(MOST_AHEAD, most_in_memory))
                        yield batch
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)


def is_out_of_shared_memory(problem: Exception) -> bool:
    is_full = isinstance(problem, OSError) and problem.errno == errno.ENOSPC
    return is_full or "shared memory" in str(problem)


def is_lost_worker(problem: Exception) -> bool:
    if isinstance(problem, RuntimeError):
        return str(problem).startswith("DataLoader worker (pid")
    return not str(problem).startswith("Caught ")  # "Caught" marks an error in a row


def bytes_of(batch: Any) -> int:
    """Bytes of its tensors; 0 for what a user's `collate_fn` returns instead of a dict."""
    if not isinstance(batch, dict):
        return 0
    return sum(value.nbytes for value in batch.values() if isinstance(value, torch.Tensor))


def shared(collate: Callable[[Any], Row], rows: Any) -> Row:
    """Move a worker's batch to shared memory here: torch would do so in a thread, whose error only the worker sees,
    while the run waits for the batch."""
    batch = collate(rows)
    if get_worker_info() is None:
        return batch
    return cast(Row, recursively_apply(torch.Tensor.share_memory_, batch))


def completed(collate: Callable[[Any], Row], complete: Callable[[Row], Row], rows: Any) -> Row:
    return complete(collate(rows))


class ReadAhead:
    """A thread that prepares the chunks of some sources in the order in which a run will need them.

    It uses separate objects, so it shares only the store with readers.

    Args:
        sources: the rows of each source, its share of the run's rows, which only affects the order of work, and the
            first row of the run in it.
    """

    def __init__(self, sources: Sequence[tuple[ChunkedRows, float, int]]) -> None:
        self.sources = [(copy(rows), share, turn) for rows, share, turn in sources]
        self.is_stopped = threading.Event()
        self.begun = deque[tuple[ChunkedRows, int]]()  # chunks in progress
        self.thread = threading.Thread(target=self.run, name="data-read-ahead", daemon=True)

    def start(self) -> None:
        atexit.register(self.stop)
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread and its worker processes; their unfinished work is discarded."""
        atexit.unregister(self.stop)
        self.is_stopped.set()
        if self.thread.is_alive():
            self.thread.join()

    def run(self) -> None:
        """The main loop. An error ends the thread: the reader of that chunk gets the same error and raises it."""
        sources = [rows.tokenized for rows, _, _ in self.sources]
        workers = num_workers()
        if workers > 1:
            workers -= 1  # leave one core to the run
        shards = make_in_order(self.missing_shards(), workers, sources)
        try:
            for _ in shards:
                self.close_chunks()
                if self.is_stopped.is_set():
                    return
            self.close_chunks()
            for source in sources:
                if not self.is_stopped.is_set() and not source.missing(source.plan.numbers):
                    source.finish()
        except CptError as problem:
            log.warning(f"Reading ahead ended: {problem}")
        finally:
            shards.close()

    def missing_shards(self) -> Iterator[SourceShard]:
        """Yield missing shards, chunk by chunk, in the order of use."""
        for rows, chunk in self.upcoming():
            if self.is_stopped.is_set():
                return
            if rows.total is not None and chunk >= rows.total.chunks:  # after `max_tokens`
                continue
            self.begun.append((rows, chunk))
            for shard in rows.tokenized.missing(rows.tokenized.plan.chunks[chunk]):
                yield rows.tokenized, shard

    def upcoming(self) -> list[tuple[ChunkedRows, int]]:
        """The chunks from the first row of the run to the end of each source's epoch, in the order of use."""
        chunks: list[tuple[float, ChunkedRows, int]] = []
        for rows, share, turn in self.sources:
            position = 0.0  # rows of the run before a chunk, estimated from file sizes
            for chunk in rows.chunks_from(turn):
                chunks.append((position, rows, chunk))
                position += rows.tokenized.plan.bytes_of_chunks[chunk] / max(share, 1e-9)
        return [(rows, chunk) for _, rows, chunk in sorted(chunks, key=itemgetter(0))]

    def close_chunks(self) -> None:
        """Pack the chunks whose shards are complete, in the order in which they were started."""
        while self.begun:
            rows, chunk = self.begun[0]
            if rows.tokenized.missing(rows.tokenized.plan.chunks[chunk]):
                return
            rows.prepare(chunk)
            self.begun.popleft()
