"""Make the next micro-batches while the model works on this one: a thread ahead of the loop, with a bounded queue between."""

import queue
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
SECONDS_BETWEEN_LOOKS = 0.1  # how soon the thread notices that nobody wants more


@dataclass(frozen=True)
class Message(Generic[Item]):
    """What the thread hands over: items, and then the error that ended them, or None for their end."""

    items: tuple[Item, ...] = ()
    error: BaseException | None = None


@dataclass
class Prefetched(Generic[Item]):
    """Iterates over `items` in a background thread, at most `depth` of them ahead; once.

    An error in the thread is raised where its item would have come. The thread ends with the last item, when the iterator is closed or
    forgotten, and with the main thread: one that is still inside torch while Python shuts down would abort the process.
    """

    items: Iterable[Item]
    depth: int
    unwanted: threading.Event = field(default_factory=threading.Event)

    def __iter__(self) -> Iterator[Item]:
        ready: queue.Queue[Message[Item]] = queue.Queue(self.depth)
        thread = threading.Thread(target=self.make, args=(ready,), name="data-prefetch")
        thread.start()
        try:
            while (message := ready.get()).items:
                yield from message.items
            if message.error is not None:
                raise message.error
        finally:
            self.unwanted.set()
            thread.join()

    def make(self, ready: queue.Queue[Message[Item]]) -> None:
        """The thread's work."""
        end: Message[Item] = Message()
        try:
            for item in self.items:
                self.put(Message((item,)), ready)
                if not self.wanted:
                    return
        except BaseException as problem:
            end = Message(error=problem)
        self.put(end, ready)

    def put(self, message: Message[Item], ready: queue.Queue[Message[Item]]) -> None:
        """Wait for a place, unless nobody wants more."""
        while self.wanted:
            try:
                ready.put(message, timeout=SECONDS_BETWEEN_LOOKS)
            except queue.Full:
                continue
            return

    @property
    def wanted(self) -> bool:
        """Whether somebody may still ask for items."""
        return not self.unwanted.is_set() and threading.main_thread().is_alive()
