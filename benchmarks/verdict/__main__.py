"""How often does a verdict mislead? `python -m benchmarks.verdict`: 20 minutes on 2 cores.

Simulated held-out sets go through the product's own functions. A document's change has a standard deviation of 5 %
and may depend on its size. Half of the sets have no document that `held_out_share` would leave to training.
Writes benchmarks/results/verdict.json.
"""

import argparse
import json
import math
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import NormalDist, mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpt.data.rows.selection import LARGEST_OF_AVERAGE, LARGEST_PART
from cpt.evaluation.paired import DocumentLosses, bits_per_byte_difference
from cpt.evaluation.sentences import outcome_of_set

Floats = NDArray[np.float64]
RESULTS = Path(__file__).parents[1] / "results" / "verdict.json"
QUANTILES = (np.arange(200_000) + 0.5) / 200_000
NORMAL = np.array([NormalDist().inv_cdf(float(q)) for q in QUANTILES])
SPREAD = 0.05  # of the documents' relative changes
SKEW = 0.75  # of the log-normal change: its skewness is 3.3
LIMITS = {"as held_out_share": True, "any": False}
SIZES: dict[str, Floats] = {
    **{f"log-normal {sigma}": np.exp(8 + sigma * NORMAL) for sigma in (0.5, 1.0, 1.5, 2.0)},
    "Pareto 2": 500 * (1 - QUANTILES) ** (-1 / 2),
    "Pareto 1.2 to 1,000 times": 500 * (1 - QUANTILES * (1 - 1000**-1.2)) ** (-1 / 1.2),
}
"""Bytes of a document, at equally spaced quantiles."""
CHANGES: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "normal": lambda draw, count: draw.normal(size=count),
    "t(3)": lambda draw, count: draw.standard_t(3, count) / math.sqrt(3),
    "skewed up": lambda draw, count: skewed(draw, count),
    "skewed down": lambda draw, count: -skewed(draw, count),
}
CORRELATIONS = (0.0, 0.5, -0.5)  # of a document's change and the logarithm of its size
DOCUMENTS = (10, 20, 40, 60, 100, 200, 400)
RUNS = 10  # on each held-out set
RATES = ("covered", "worked at 0 %", "as good at +5 %", "useful at 0 %")


def main() -> None:
    """Simulate each case and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict", description=__doc__)
    parser.add_argument("--sets", type=int, default=100, help="held-out sets of each case")
    parser.add_argument("--seed", type=int, default=20_261_123)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    cases = list(product(LIMITS, SIZES, CHANGES, CORRELATIONS, DOCUMENTS))
    with ProcessPoolExecutor(asked.processes) as processes:
        seeds = [[asked.seed, number] for number in range(len(cases))]
        rates = list(processes.map(simulate, cases, seeds, [asked.sets] * len(cases), chunksize=8))
    RESULTS.write_text(results_text(dict(zip(cases, rates, strict=True)), asked))


def simulate(
    case: tuple[str, str, str, float, int], seed: list[int], sets: int
) -> dict[str, float]:
    """How often each thing happens, of `sets` x RUNS verdicts."""
    limit, shape, change, correlation, count = case
    draw, sizes = np.random.default_rng(seed), SIZES[shape]
    if LIMITS[limit]:
        sizes = sizes[sizes <= max(LARGEST_PART * count, LARGEST_OF_AVERAGE) * sizes.mean()]
    logs = (np.log(sizes) - np.log(sizes).mean()) / np.log(sizes).std()
    drift = float(
        (sizes * logs).sum() / sizes.sum()
    )  # bytes, not documents, decide the true change, which is then 0
    happened = []
    for _ in range(sets):
        chosen = draw.integers(len(sizes), size=count)
        num_bytes = sizes[chosen].astype(np.int64)
        nats = math.log(2) * num_bytes * draw.normal(1, 0.1, count)
        before = DocumentLosses(
            np.arange(count, dtype=np.uint64), num_bytes, nats, num_bytes // 4, num_bytes // 10
        )
        for _ in range(RUNS):
            noise = math.sqrt(1 - correlation**2) * CHANGES[change](draw, count) + correlation * (
                logs[chosen] - drift
            )
            same, worse = (
                bits_per_byte_difference(
                    [before], [replace(before, nats=nats * (1 + truth + SPREAD * noise))]
                )
                for truth in (0.0, 0.05)
            )
            happened.append(
                (
                    same.low <= 0 <= same.high,
                    outcome_of_set(same, is_general=False) == "better",
                    outcome_of_set(worse, is_general=True)
                    in ("better", "about the same", "not worse"),
                    outcome_of_set(same, is_general=True) != "unknown",
                )
            )
    return dict(
        zip(RATES, (100 * mean(column) for column in zip(*happened, strict=True)), strict=True)
    )


def skewed(draw: np.random.Generator, count: int) -> Floats:
    """Log-normal, with mean 0 and standard deviation 1."""
    variance = math.exp(SKEW**2)
    return (draw.lognormal(0, SKEW, count) - math.sqrt(variance)) / math.sqrt(
        (variance - 1) * variance
    )


def results_text(
    rates: dict[tuple[str, str, str, float, int], dict[str, float]], asked: argparse.Namespace
) -> str:
    """The results file: per number of documents the mean over the forms of change, and the worst of them."""
    cells: dict[tuple[str, str, bool, int], list[dict[str, float]]] = {}
    for (limit, shape, _, correlation, count), found in rates.items():
        cells.setdefault((limit, shape, correlation != 0, count), []).append(found)
    rows = []
    for limit, depends in product(LIMITS, (False, True)):
        name = f"documents: {limit}, change {'depends' if depends else 'does not depend'} on size"
        own = {key: found for key, found in cells.items() if (key[0], key[2]) == (limit, depends)}
        covered = [mean(one["covered"] for one in found) for found in own.values()]
        for measured, end in ((min(covered), "lowest"), (max(covered), "highest")):
            rows.append(
                row(
                    f"{name}: coverage, {end} of a set's form",
                    "92 to 98",
                    measured,
                    met=92 <= measured <= 98,
                )
            )
        worked = max(mean(one["worked at 0 %"] for one in found) for found in own.values())
        rows.append(
            row(f"{name}: 'It worked' at a true 0 %, highest", "<= 5", worked, met=worked <= 5)
        )
        good = max(mean(one["as good at +5 %"] for one in found) for found in own.values())
        rows.append(
            row(
                f"{name}: 'as good as before' at a true +5 %, highest",
                "<= 0.5",
                good,
                met=good <= 0.5,
            )
        )
        useful = mean(
            one["useful at 0 %"] for key, found in own.items() if key[3] == 400 for one in found
        )
        rows.append(
            row(
                f"{name}: known of general text at a true 0 %, 400 documents, mean",
                None,
                useful,
                met=None,
            )
        )
    lines = [
        json.dumps(
            {
                **dict(
                    zip(("documents", "sizes", "change depends on size", "count"), key, strict=True)
                ),
                **{rate: round(mean(one[rate] for one in found), 1) for rate in RATES},
                "covered, lowest": round(min(one["covered"] for one in found), 1),
                "worked at 0 %, highest": round(max(one["worked at 0 %"] for one in found), 1),
            }
        )
        for key, found in cells.items()
    ]
    head: dict[str, Any] = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "libraries": {"numpy": np.__version__},
        "seed": asked.seed,
        "verdicts of a case": asked.sets * RUNS,
        "measurements": rows,
    }
    return (
        json.dumps(head, indent=1)[:-2] + ',\n "cases": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    )


def row(name: str, target: str | None, measured: float, *, met: bool | None) -> dict[str, Any]:
    """A measurement in percent."""
    return {"name": name, "target": target, "measured": round(measured, 1), "unit": "%", "met": met}


if __name__ == "__main__":
    main()
