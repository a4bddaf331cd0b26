"""Start a process of a run as far as its data go, and look rows up: `python -m benchmarks.scale.start FOLDER TOKENS`.

Prints JSON: seconds of processor time, those of a numpy copy in the same process among them, and bytes of memory.
"""

import argparse
import json
import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.scale.tables import (
    SEED,
    SEQUENCE_LENGTH,
    budget_of,
    data_of,
    evaluation,
    realised_shares,
    tokenizer,
)
from cpt.data.rows.build import PreparedData, build_data
from cpt.data.rows.mixture import MixtureRows

LOOKUPS, RESUMES = 300, 20
COPIED = 64 * 2**20  # bytes of the numpy copy that seconds are told beside
BATCH = 8


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.start", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokens", type=int)
    arguments = parser.parse_args()
    print(json.dumps(measured(arguments.folder, arguments.tokens)))


def measured(folder: Path, tokens: int) -> dict[str, object]:
    """All figures of a process."""
    some = tokenizer()
    copy, before = seconds_of_copy(), resident()
    prepared, start = timed(lambda: build(folder, tokens, some))
    started = resident()
    rows = prepared.rows
    number = budget_of(tokens).tokens // SEQUENCE_LENGTH
    _, first = timed(lambda: rows.batch(range(BATCH)))
    draw = np.random.default_rng(0)
    places = draw.integers(0, number, LOOKUPS).tolist()
    resumes = []
    for at in np.linspace(0, number - BATCH, RESUMES).astype(int).tolist():
        again = opened_anew(prepared)
        resumes.append(timed(lambda again=again, at=at: again.batch(range(at, at + BATCH)))[1])
    anywhere = [timed(lambda at=at: rows[at])[1] for at in places]
    next_ones = [
        timed(lambda at=at: rows[at])[1] for at in range(number // 2, number // 2 + LOOKUPS)
    ]
    found = {
        "copy": copy,
        "start": start,
        "first_batch": first,
        "resumes": resumes,
        "lookup_anywhere": median(anywhere),
        "lookup_next": median(next_ones),
        "memory_start": started - before,
        "memory_read": resident() - before,
        "rows": number,
        "chunks": sum(len(one.tokenized.plan.chunks) for one in prepared.chunked),
        "shards": sum(len(one.tokenized.plan.shards) for one in prepared.chunked),
        "files": sum(len(one.tokenized.states) for one in prepared.chunked),
        "documents": sum(report.documents for report in prepared.sources),
        "state": len(json.dumps(prepared.state(number // 2))),
    }
    asked = [report.share for report in prepared.sources]
    found["off_points"] = {
        str(part): 100
        * max(
            abs(a - b)
            for a, b in zip(
                asked, realised_shares(rows, prepared.chunked, int(part * number)), strict=True
            )
        )
        for part in (0.001, 0.01, 0.1, 1.0)
    }
    return found


def build(folder: Path, tokens: int, some: object) -> PreparedData:
    """What each process of a run does with the recipe's data."""
    return build_data(
        data_of(folder),
        some,
        seed=SEED,
        evaluation=evaluation(),
        budget=budget_of(tokens),
        cache_dir=folder / "cache",
    )  # type: ignore[arg-type]


def opened_anew(prepared: PreparedData) -> MixtureRows:
    """The same rows as a process has them that has just started, and read none."""
    return MixtureRows([copy(one) for one in prepared.chunked], prepared.rows.turns, SEED)


def timed(function: Callable[[], object]) -> tuple[object, float]:
    """What a function gives, and its seconds of processor time: others may be at work on the machine."""
    begin = time.process_time()
    result = function()
    return result, time.process_time() - begin


def seconds_of_copy() -> float:
    """Of a numpy copy, on this machine in this minute."""
    array = np.ones(COPIED, np.uint8)
    return median(timed(array.copy)[1] for _ in range(7))


def resident() -> int:
    """Bytes of this process's own memory: mapped files are the machine's, and shared."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["RssAnon"].split()[0])


if __name__ == "__main__":
    main()
