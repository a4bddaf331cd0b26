"""What a run logged, read from its metrics.jsonl as columns of numbers, fast enough for twenty long runs at once."""

import os
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path
from threading import Lock

import numpy as np

from cpt.runs.metric_lines import ALWAYS, Columns, Floats, columns_of, lacking

FILE_NAME = "metrics.jsonl"
BLOCK = 2**22  # bytes that one thread parses at once
LONGEST_LINE = 2**16  # that it has room for behind them
MOST_THREADS = 8


@dataclass(frozen=True)
class Metrics:
    """All lines of a run."""

    columns: Mapping[str, Floats]
    """By name of the figure, one value for each line, NaN where the line lacks it; always `step` and `tokens`."""

    @property
    def names(self) -> list[str]:
        """The figures that some line has, `step` and `tokens` among them."""
        return [name for name, values in self.columns.items() if not np.isnan(values).all()]

    def curve(self, name: str) -> tuple[Floats, Floats]:
        """Tokens and values, in the order of tokens, where there is a value; both empty for a figure that was never
        logged."""
        return self.over("tokens", name)

    def over(self, axis: str, name: str) -> tuple[Floats, Floats]:
        """The same over `step`, or over any other figure that grows."""
        if name not in self.columns or axis not in self.columns:
            return np.empty(0), np.empty(0)
        x, y = self.columns[axis], self.columns[name]
        is_there = np.isfinite(x) & np.isfinite(y)
        x, y = x[is_there], y[is_there]
        if (x[1:] < x[:-1]).any():
            order = np.argsort(x, kind="stable")
            return x[order], y[order]
        return x, y

    def last(self, name: str) -> float | None:
        """The newest value, None where there is none."""
        values = self.curve(name)[1]
        return float(values[-1]) if len(values) else None


def read_metrics(folder: Path, names: Collection[str] | None = None) -> Metrics:
    """Read the metrics of a run; without lines where there is no such file, or none that can be read.

    A value that is no finite number counts as not logged; a line that a crash cut off, or that is no JSON, is left
    out.

    Args:
        folder: of the run.
        names: the figures that are wanted, `eval_*` for all that begin so; all of them by default. The fewer, the
            faster.
    """
    try:
        with (folder / FILE_NAME).open("rb") as file:
            parts = parsed_by_threads(file, names)
    except OSError:
        parts = []
    found = dict.fromkeys(chain(ALWAYS, *parts))
    return Metrics(
        {name: np.concatenate([np.empty(0), *(part.get(name, lacking(part)) for part in parts)]) for name in found}
    )


def parsed_by_threads(file: BufferedReader, names: Collection[str] | None) -> list[Columns]:
    """The columns of each block, in order; each thread reads a block when it has parsed the one before."""
    parts: dict[int, Columns] = {}
    lock = Lock()

    def work() -> None:
        room = memoryview(
            bytearray(BLOCK + LONGEST_LINE)
        )  # used again and again: memory that is new costs more than what is read into it
        while True:
            with lock:
                place, length = file.tell(), file.readinto(room[:BLOCK])
                rest = file.readline()
            if not length:
                return
            end = length + len(rest)
            if end <= len(room):
                room[length:end] = rest
            parts[place] = columns_of(
                room[:end] if end <= len(room) else memoryview(bytes(room[:length]) + rest), names
            )

    num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as threads:
        for thread in [threads.submit(work) for _ in range(num_threads)]:
            thread.result()
    return [parts[place] for place in sorted(parts)]
