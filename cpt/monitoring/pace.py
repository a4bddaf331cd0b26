"""Look at a thing no more often than its cost allows."""

import math
import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")
SHARE = 0.001  # of the time that passes


class Pace:
    """Rests a thousand times as long as a look took: where looks are dear, logs go without their figures."""

    def __init__(self) -> None:
        self.next = -math.inf

    def look(self, at: Callable[[], Seen]) -> Seen | None:
        """What the look gives; None where it is too early."""
        began = time.perf_counter()
        if began < self.next:
            return None
        seen = at()
        ended = time.perf_counter()
        self.next = ended + (ended - began) / SHARE
        return seen
