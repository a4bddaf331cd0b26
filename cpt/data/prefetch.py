"""Make the next micro-batches while the model works on this one, as far ahead and by as many threads as the measured
wait asks for.

Whatever the depth and the number of threads, the items come in the same order; an error comes where its item would
have come.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

Task = TypeVar("Task")
Item = TypeVar("Item")
log = logging.getLogger("cpt")
SECONDS_BETWEEN_LOOKS = 0.1  # how soon a thread notices that nobody wants more
FIRST_DEPTH = 16
MOST_ITEMS, MOST_BYTES = 256, 256 * 2**20  # made ahead, however late they come
WINDOW = 32  # items between two looks at the wait
BEARABLE_WAIT = 0.01  # share of the time
MUCH_IDLE = 0.1  # share of the time; a thread that rests so much makes enough on the whole
WORTH_A_THREAD = 1.2  # times as fast; threads share one interpreter, so more of them are often slower


def nothing() -> None:
    """Do it."""


@dataclass(frozen=True)
class Made(Generic[Item]):
    """What a thread hands over: an item, or the error that came instead, or neither at the end."""

    items: tuple[Item, ...] = ()
    error: BaseException | None = None


@dataclass
class Measured:
    """What happened since the last look; in seconds."""

    since: float = field(default_factory=time.perf_counter)
    items: int = 0
    waited: float = 0.0
    """By the loop, for items."""
    idle: float = 0.0
    """By the threads, for somebody to take items."""


class Prefetched(Generic[Task, Item]):
    """Iterates over `make(task)` for each task, made in background threads; once.

    The threads end with the last item, when the iterator is closed or forgotten, and with the main thread: one that is
    still inside torch while Python shuts down would abort the process.

    Args:
        depth: how many items may be made and not taken. None: a few at first; twice as many each time when the loop
            waited although the threads had time to rest, up to MOST_ITEMS and MOST_BYTES.
        most_threads: to be tried one after the other where none ever rests and the loop waits; one that does not help
            ends. Several threads must then be able to call `make` at once.
        num_bytes: of an item.
        begin: called by each thread first.
    """

    def __init__(
        self,
        make: Callable[[Task], Item],
        tasks: Iterable[Task],
        *,
        depth: int | None = None,
        most_threads: int = 1,
        num_bytes: Callable[[Item], int] = lambda _: 0,
        begin: Callable[[], None] = nothing,
    ) -> None:
        self.make, self.tasks, self.num_bytes, self.begin = make, iter(tasks), num_bytes, begin
        self.is_adaptive = depth is None
        self.depth = FIRST_DEPTH if depth is None else depth
        self.most_depth = MOST_ITEMS
        self.num_threads, self.most_threads = 1, most_threads
        self.ready: dict[int, Made[Item]] = {}
        self.begun = self.taken = 0
        self.is_wanted, self.is_ended, self.told = True, False, False
        self.lock = threading.Lock()
        self.arrived, self.freed = (
            threading.Condition(self.lock),
            threading.Condition(self.lock),
        )  # an item, and a place for one
        self.threads: list[threading.Thread] = []
        self.measured = Measured()
        self.rate_before_trial: float | None = None

    def __iter__(self) -> Iterator[Item]:
        self.start_thread()
        try:
            for number in count():
                made = self.take(number)
                if made.error is not None:
                    raise made.error
                if not made.items:
                    return
                yield from made.items
                if self.is_adaptive and number == 0:
                    self.measured = Measured()  # the first one always has to be waited for
                    self.most_depth = max(2, min(MOST_ITEMS, MOST_BYTES // max(1, self.num_bytes(*made.items))))
                    self.depth = min(self.depth, self.most_depth)
                elif self.is_adaptive:
                    self.adapt()
        finally:
            with self.lock:
                self.is_wanted = False
                self.freed.notify_all()
            for thread in self.threads:
                thread.join()

    def take(self, number: int) -> Made[Item]:
        """The item of a number, waited for if need be."""
        with self.lock:
            if number not in self.ready:
                asked = time.perf_counter()
                self.arrived.wait_for(lambda: number in self.ready)
                self.measured.waited += time.perf_counter() - asked
            self.measured.items += 1
            self.taken = number + 1
            if self.begun - self.taken <= self.resumed_at:
                self.freed.notify()
            return self.ready.pop(number)

    def adapt(self) -> None:
        """Look at what was measured, and go further ahead or try another thread."""
        measured = self.measured
        if measured.items < WINDOW:
            return
        seconds = time.perf_counter() - measured.since
        is_late, rate = measured.waited > BEARABLE_WAIT * seconds, measured.items / seconds
        self.measured = Measured()
        if self.rate_before_trial is not None and is_late and rate < WORTH_A_THREAD * self.rate_before_trial:
            self.num_threads -= 1
            self.most_threads = self.num_threads
            is_late = False
        self.rate_before_trial = None
        if not is_late:
            return
        if measured.idle > MUCH_IDLE * seconds * self.num_threads:
            self.depth = min(2 * self.depth, self.most_depth)
        elif self.num_threads < self.most_threads:
            self.rate_before_trial = rate
            self.num_threads += 1
            self.start_thread()
        else:
            return
        if not self.told:
            self.told = True
            log.info(
                f"micro-batches came late ({measured.waited / seconds:.1%} of the time); now up to {self.depth} are"
                f" made ahead by {self.num_threads} thread(s), and more if need be"
            )

    def start_thread(self) -> None:
        """One more."""
        self.threads.append(threading.Thread(target=self.work, args=(len(self.threads),), name="data-prefetch"))
        self.threads[-1].start()

    def work(self, thread: int) -> None:
        """What a thread does: the next task, as long as there is a place for its item."""
        begin = self.begin
        while (next_task := self.next_task(thread)) is not None:
            number, task = next_task
            try:
                begin()
                begin = nothing
                made = Made((self.make(task),))
            except BaseException as problem:  # raised in the loop
                made = Made(error=problem)
            self.put(number, made)

    def next_task(self, thread: int) -> tuple[int, Task] | None:
        """A task and its number, None when there is nothing more to do."""
        with self.lock:
            asked = time.perf_counter()
            is_full = self.begun - self.taken >= self.depth
            while self.wanted and thread < self.num_threads and is_full:
                self.freed.wait(SECONDS_BETWEEN_LOOKS)
                is_full = self.begun - self.taken > self.resumed_at
            self.measured.idle += time.perf_counter() - max(asked, self.measured.since)
            if not self.wanted or self.is_ended or thread >= self.num_threads:
                return None
            number, self.begun = self.begun, self.begun + 1
            try:
                return number, next(self.tasks)
            except StopIteration:
                end: Made[Item] = Made()
            except BaseException as problem:
                end = Made(error=problem)
            self.is_ended = True
            self.ready[number] = end
            self.arrived.notify()
            return None

    def put(self, number: int, made: Made[Item]) -> None:
        """Hand over what was made; after an error nothing new is begun."""
        with self.lock:
            self.is_ended = self.is_ended or made.error is not None
            self.ready[number] = made
            self.arrived.notify()

    @property
    def resumed_at(self) -> int:
        """So few items left that a thread goes on: where it makes several at a time, threads change less often, as
        short steps need."""
        return self.depth - max(1, self.depth // 4)

    @property
    def wanted(self) -> bool:
        """Whether somebody may still ask for items."""
        return self.is_wanted and threading.main_thread().is_alive()
