"""Resuming: from nothing in memory to the first batch at a position. `python -m benchmarks.data.resume ACTION JOB`.

synthetic: in a mixture of two sources of 10^9 rows each that are nowhere, to see what finding a place costs.
real: in the corpus that the job's folder keeps tokens of, from the recipe to the batch.
"""

import json
import sys
import time
from statistics import median
from typing import Any

from benchmarks.data.ours import prepare
from benchmarks.data.peers.clock import BATCH, LENGTH, Job, Measured, read_job
from cpt.data.rows.chunks import shuffled
from cpt.data.rows.loader import CPTDataLoader
from cpt.data.rows.mixture import MixtureRows, Turns
from cpt.data.store.shards import seed_of

SIZE = 10**9
POSITIONS = (0, 10**3, 10**4, 10**5, 10**6, 10**7, 10**8, 5 * 10**8, SIZE - 2 * BATCH)
SHARES = (0.0, 0.1, 0.5, 0.9)
REPETITIONS = 5


class SyntheticRows:
    """A source of SIZE rows that are not stored."""

    sequence_length = LENGTH

    def row_at(self, turn: int, seed: str) -> tuple["SyntheticRows", int, int]:
        """The row whose turn it is."""
        epoch, place = divmod(turn, SIZE)
        return self, shuffled(place, SIZE, seed_of(seed, epoch)), epoch

    def fill(self, number: int, epoch: int, *lines: Any) -> None:
        for line in lines:
            line[:] = number


def synthetic(job: Job) -> Measured:
    seconds: dict[int, list[float]] = {position: [] for position in POSITIONS}
    for seed in range(REPETITIONS):
        for position in POSITIONS:
            start = time.perf_counter()
            rows = MixtureRows([SyntheticRows(), SyntheticRows()], Turns([(0, [0.7, 0.3])]), seed)
            next(iter(CPTDataLoader(rows, micro_batch=BATCH, rows_in_all=SIZE, first_row=position)))
            seconds[position].append(time.perf_counter() - start)
    return {str(position): median(some) for position, some in seconds.items()}


def real(job: Job) -> Measured:
    """Seconds by position, at some shares of one time through; the job's variant says how many rows that is."""
    rows, measured = int(job.variant), {}
    for position in (int(share * rows) for share in SHARES):
        seconds = []
        for _ in range(REPETITIONS):
            start = time.perf_counter()
            loader = CPTDataLoader(
                prepare(job).rows, micro_batch=BATCH, rows_in_all=10 * rows, first_row=position
            )
            next(iter(loader))
            seconds.append(time.perf_counter() - start)
        measured[str(position)] = median(seconds)
    return measured


def main(action: str, raw: str) -> None:
    print(json.dumps({"synthetic": synthetic, "real": real}[action](read_job(raw))))


if __name__ == "__main__":
    main(*sys.argv[1:])
