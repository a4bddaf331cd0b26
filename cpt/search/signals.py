"""Signals that came while trials run: noted, for the loop that watches them to pass on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cpt.launchers.attempts import FORWARDED


@dataclass
class Signals:
    """What a search was told."""

    first: int = 0
    """The first signal that came, 0 where none did."""
    count: int = 0
    wake: threading.Event = field(default_factory=threading.Event)
    """Set by each of them, so that nobody sleeps on."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take them; where Python has none, outside of the main thread, they are left alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.at_signal) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def at_signal(self, number: int, _: object) -> None:
        """One signal."""
        self.first = self.first or number
        self.count += 1
        self.wake.set()
