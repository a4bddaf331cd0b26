"""Make or fetch the windows that a run reads next, and remove those behind it where the disk is bounded."""

import atexit
import heapq
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cpt.data.rows.windows import WindowedRows
from cpt.data.store.parallel import num_workers
from cpt.data.store.tokenized import Wanted, made
from cpt.errors import CptError

log = logging.getLogger("cpt")
POLL_SECONDS = 0.2
BEHIND = 1  # windows that stay behind the foremost reader, for slower ones


class Stop(NamedTuple):
    source: int
    epoch: int
    """Times that it went through the source before."""
    place: int
    """The window's place in the order of this epoch."""
    window: int


class ReadAhead:
    """A thread that makes the windows of some sources in the order in which a run will need them.

    It works with objects of its own, so it shares only the store with readers.

    Args:
        rows: of each source.
        shares: of the run's rows that come from each source; they decide only what is made first.
        first_turns: where the run begins in each source.
        disk_bytes: that the tokens of all these sources may take, about; None for as many as there are.
    """

    def __init__(
        self,
        rows: Sequence[WindowedRows],
        shares: Sequence[float],
        first_turns: Sequence[int],
        disk_bytes: int | None = None,
    ) -> None:
        self.rows = [WindowedRows(*one.__reduce__()[1]) for one in rows]
        self.shares, self.first_turns, self.disk_bytes = shares, first_turns, disk_bytes
        self.unwanted = threading.Event()
        self.begun: list[Stop] = []
        """Windows with missing shards."""
        self.needed: list[Stop] = []
        """From the readers on, as far as the thread is."""
        self.present = {
            (number, window): one.num_bytes(window)
            for number, one in enumerate(self.rows)
            for window in range(len(one.tokenized.plan.windows) if disk_bytes is not None else 0)
            if one.window_folder(window).exists()
        }
        """Bytes of the windows that are there, by source and window."""
        for one in self.rows:
            one.forget_marks()
        self.thread = threading.Thread(target=self.run, name="data-read-ahead", daemon=True)

    def start(self) -> None:
        """Begin; the thread ends when all is made, with an error, or with the process."""
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
        cores = num_workers()
        shards = made(
            self.wanted(), cores and max(1, cores - 1), [rows.tokenized for rows in self.rows]
        )  # one is left to the run itself
        try:
            for _ in shards:
                self.close_windows()
                if self.unwanted.is_set():
                    return
            self.close_windows()
            if self.disk_bytes is None:
                self.finish_sources()
        except CptError as problem:
            log.warning(f"Reading ahead ended: {problem}")
        finally:
            shards.close()

    def finish_sources(self) -> None:
        for source in (rows.tokenized for rows in self.rows):
            if not self.unwanted.is_set() and not source.missing(range(len(source.plan.shards))):
                source.finish()

    def wanted(self) -> Iterator[Wanted]:
        """Shards that are not there, window by window, as they will be needed; waits while the disk is full."""
        for stop in self.stops():
            tokenized = self.rows[stop.source].tokenized
            if self.is_passed(stop):  # a reader was faster and made it itself
                self.count_if_present(stop)
                continue
            self.needed.append(stop)
            self.begun.append(stop)
            for shard in tokenized.missing(tokenized.plan.windows[stop.window]):
                self.wait_until(self.has_room)
                if self.unwanted.is_set():
                    return
                yield tokenized, shard
            if self.unwanted.is_set():
                return

    def stops(self) -> Iterator[Stop]:
        """The windows of all sources as a run comes to them, from where it begins; once through, or for ever where
        windows are removed."""
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
            num_bytes = rows.num_bytes(stop.window) if self.disk_bytes is not None else 0
            self.present[stop.source, stop.window] = num_bytes
            self.begun.pop(0)

    def has_room(self) -> bool:
        """Whether the windows that were begun have room, after those that all readers have left were removed as far as
        that is needed."""
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

    def count_if_present(self, stop: Stop) -> None:
        rows = self.rows[stop.source]
        if rows.window_folder(stop.window).exists():
            self.present[stop.source, stop.window] = rows.num_bytes(stop.window)
        self.has_room()

    def file_bytes(self, place: tuple[int, int]) -> int:
        source, window = place
        plan = self.rows[source].tokenized.plan
        return sum(plan.num_bytes[shard] for shard in plan.windows[window])

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not self.unwanted.is_set() and not is_so():
            time.sleep(POLL_SECONDS)
