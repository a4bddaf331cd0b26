"""How much the store on this machine's disk may hold where a bucket has the whole of it: $CPT_CACHE_LIMIT.

A run keeps the windows that it comes to and removes those behind it (`read_ahead.py`); what else is in the folder goes
first, what was not used for longest before the rest, and never what a running process holds. Several runs at once each
count what all of them have there.
"""

import os
import re
import time
from pathlib import Path

from cpt.data.store.bucket import VARIABLE as STORE
from cpt.data.store.entries import entries, remove
from cpt.data.store.folder import size_of
from cpt.errors import ResourceError

VARIABLE = "CPT_CACHE_LIMIT"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
SECONDS_BETWEEN_LOOKS = 60.0  # at what others have; on a disk of a terabyte a look takes a second or two


def cache_limit() -> int | None:
    """Bytes that the store's folder may hold; None for as many as there are.

    Raises:
        ResourceError: it is no size, or there is no bucket to fetch from again.
    """
    words = os.environ.get(VARIABLE, "")
    if not words:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]I?|)B?", words.strip().upper())
    if found is None or float(found[1]) == 0:
        raise ResourceError(f"{VARIABLE} is `{words}`, expected a size: 200GB, 1.5TB, 500GiB.")
    if not os.environ.get(STORE):
        raise ResourceError(
            f"{VARIABLE} is set and {STORE} is not: what is removed could not be fetched again. Set {STORE} to a"
            " bucket, or bound the store of streamed sources with `data.disk_bytes`."
        )
    return round(float(found[1]) * UNITS[found[2]])


class Room:
    """What is left of the limit for one run's windows."""

    def __init__(self, cache_dir: Path, limit: int) -> None:
        self.cache_dir, self.limit = cache_dir, limit
        self.others, self.looked_at = 0, -SECONDS_BETWEEN_LOOKS

    def left(self, own: int, wanted: int) -> int:
        """Bytes that the run may have, after others' leftovers were removed as far as that is needed.

        Args:
            own: bytes that it has there now.
            wanted: that it has and comes to next.
        """
        if time.monotonic() - self.looked_at > SECONDS_BETWEEN_LOOKS:
            self.looked_at, self.others = time.monotonic(), max(0, size_of(self.cache_dir) - own)
            if self.others + wanted > self.limit:
                self.make_room(self.others + wanted - self.limit)
        return self.limit - self.others

    def make_room(self, wanted: int) -> None:
        """Remove what was not used for longest, as much as is wanted, and nothing that a process holds."""
        for entry in reversed(entries(self.cache_dir)):
            if wanted <= 0:
                return
            if remove(entry):
                self.others, wanted = self.others - entry.num_bytes, wanted - entry.num_bytes
