"""The entries of a source's windows: a small file for each, which stays when the window's tokens are removed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpt.cache import write_once
from cpt.files import read_sealed, sealed

Key = TypeVar("Key")


@dataclass(frozen=True)
class WindowEntry:
    first_row: int
    """Rows of the windows before."""
    rows: int
    tokens_before: int
    """Tokens of the documents trained on in the windows before."""
    tokens: int
    tokens_in_rows: int
    """More than these where windows of a document overlap."""
    positions: int
    """Positions of all rows, padding included."""
    documents: int
    held_out: int
    left_out: dict[str, int]
    """Reason -> documents, those of the source's filters among them."""
    bad_rows: dict[str, int]
    lengths: dict[int, int]
    """Documents trained on, by length: n, a power of two, stands for n up to 2n - 1 tokens."""
    longest: tuple[str, int]
    own_digest: str
    """A hash of the documents trained on."""
    digest: str
    """A hash of these and of all windows before."""

    @property
    def end(self) -> int:
        return self.first_row + self.rows


START = WindowEntry(0, 0, 0, 0, 0, 0, 0, 0, {}, {}, {}, ("", 0), "", "")


def entry_of(content: Mapping[str, Any]) -> WindowEntry:
    lengths = {int(length): count for length, count in content["lengths"].items()}
    return WindowEntry(**{**content, "lengths": lengths, "longest": tuple(content["longest"])})


def summed(entries: Sequence[WindowEntry]) -> WindowEntry:
    """The entries of consecutive windows as one."""
    if not entries:
        return START
    numbers = ("rows", "tokens", "tokens_in_rows", "positions", "documents", "held_out")
    counts = ("left_out", "bad_rows", "lengths")
    total: dict[str, Any] = {name: sum(vars(entry)[name] for entry in entries) for name in numbers}
    total |= {name: added([vars(entry)[name] for entry in entries]) for name in counts}
    longest = max((entry.longest for entry in entries), key=lambda place: place[1])
    return replace(START, **total, longest=longest, digest=entries[-1].digest)


def added(counts: Sequence[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def by_power_of_two(lengths: NDArray[np.int64]) -> dict[int, int]:
    """How many lengths there are from each power of two to the next; lengths are 1 at least."""
    exponents, counts = np.unique(np.frexp(lengths)[1] - 1, return_counts=True)
    return {2**exponent: count for exponent, count in zip(exponents.tolist(), counts.tolist(), strict=True)}


# --- total ---


@dataclass(frozen=True)
class Total:
    """The totals of one epoch of a source."""

    rows: int
    windows: int
    rows_of: list[int] | None
    """Rows of each window; None where a checkpoint continued in an empty store, which lacks the windows before it."""
    everything: WindowEntry | None
    """The sum over all windows; None in the same case."""

    @cached_property
    def first_rows(self) -> list[int]:
        return list(accumulate(self.rows_of or [], initial=0))


def write_total(folder: Path, last: int, entries: Sequence[WindowEntry]) -> None:
    """Write the totals of one epoch from the entries of all windows, or of the last ones that are known."""
    content: dict[str, Any] = {"rows": entries[-1].end, "windows": last + 1, "rows_of": None, "everything": None}
    if len(entries) == last + 1:
        content |= {"rows_of": [entry.rows for entry in entries], "everything": asdict(summed(entries))}
    write_once(folder / "total.json", sealed(content))


def read_total(folder: Path) -> Total | None:
    """The totals of one epoch; None if its last window was not made yet, or if the file is damaged."""
    content = read_sealed(folder / "total.json")
    if content is None:
        with suppress(OSError):
            (folder / "total.json").unlink()  # otherwise each read would report the damage
        return None
    everything = content.pop("everything")
    return Total(**content, everything=None if everything is None else entry_of(everything))
