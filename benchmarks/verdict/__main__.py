"""How often does a verdict mislead? `python -m benchmarks.verdict`: 20 minutes on 2 cores.

Simulated held-out sets, with their longest documents left out as cpt does, go through the product's own functions and
through other rules on the same numbers. Writes benchmarks/results/verdict.json.
"""

import argparse
import json
import math
import os
import platform
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpt.data.rows.selection import LARGEST_OF_AVERAGE
from cpt.evaluation import paired
from cpt.evaluation.paired import DocumentLosses, bits_per_byte_difference, t_quantile

Floats = NDArray[np.float64]
RESULTS = Path(__file__).parents[1] / "results" / "verdict.json"
DRAWS_AT_ONCE = 500
DOCUMENTS = (5, 8, 12, 20, 43, 100, 300, 1000)
SIZES = ("log-normal 1", "log-normal 1.5", "Pareto 1.2", "one document of 30 %")
DEPENDENCES = (0.0, 0.5, -0.5)  # correlation of a document's change and the logarithm of its size
NOISES = ("normal", "skewed")  # skewed: log-normal, of skewness 3.3; only without dependence
SPREAD = 0.014  # standard deviation of the documents' log ratios
WINDOW = 8192  # bytes that a model reads at once
TRUE_RISE = 0.01
RESAMPLES = 399
AVERAGE = 4000.0  # bytes
RULES = ("documents", "paired t", "signed rank", "bootstrap-t", "all bytes")
"""`documents` decides a verdict: Student's t on log ratios, extended as by Hall. `all bytes` decided it before."""
Case = tuple[int, str, float, str]
Rates = dict[str, Any]


def main() -> None:
    """Simulate each case and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdict", description=__doc__)
    parser.add_argument("--draws", type=int, default=10_000, help="held-out sets of each case")
    parser.add_argument("--seed", type=int, default=20_261_130)
    parser.add_argument("--processes", type=int, default=2)
    asked = parser.parse_args()
    cases = [case for case in product(DOCUMENTS, SIZES, DEPENDENCES, NOISES) if is_simulated(case)]
    with ProcessPoolExecutor(asked.processes) as processes:
        seeds = [[asked.seed, number] for number in range(len(cases))]
        found = list(processes.map(simulate, cases, seeds, [asked.draws] * len(cases)))
    RESULTS.write_text(results_text(dict(zip(cases, found, strict=True)), asked))


def is_simulated(case: Case) -> bool:
    _, sizes, dependence, noise = case
    return noise == "normal" or (sizes == SIZES[0] and dependence == 0)


def simulate(case: Case, seed: list[int], draws: int) -> Rates:
    """Rates in percent, by rule: how often an interval covers the truth, and how often a rule says `better`, `worse`
    at a true 0, and `worse` at a true rise. `unknown` is counted where no document dominates."""
    paired.t_quantile = rounded_quantile
    draw = np.random.default_rng(seed)
    parts = [
        documents(draw, case, min(DRAWS_AT_ONCE, draws - first))
        for first in range(0, draws, DRAWS_AT_ONCE)
    ]
    truth = float(np.mean([logs.mean() for _, logs in parts]))
    of_bytes = [(bits * np.expm1(logs - truth)).sum(1) / bits.sum(1) for bits, logs in parts]
    truth_of_bytes = float(np.concatenate(of_bytes).mean())
    counts = {rule: np.zeros(4) for rule in RULES}  # covered, better, worse, rise found
    outcomes = {"unknown at 0": 0, "unknown at the rise": 0}
    for bits, logs in parts:
        logs = logs - truth
        for rule, interval in INTERVALS.items():
            low, high = interval(draw, logs)
            counts[rule] += tally(low, high, 0.0, math.log1p(TRUE_RISE))
        low, high = interval_of_bytes(bits, np.expm1(logs))
        rise = (1 + TRUE_RISE) * (1 + truth_of_bytes) - 1 - truth_of_bytes
        counts["all bytes"] += tally(low, high, truth_of_bytes, rise)
        for one_bits, one_logs in zip(bits, logs, strict=True):
            same = verdict_on(one_bits, one_logs)
            worse = verdict_on(one_bits, one_logs + math.log1p(TRUE_RISE))
            assert same.typical is not None
            covered = same.typical.low <= 0 <= same.typical.high
            outcome, risen = same.outcome(), worse.outcome()
            counts["documents"] += (
                covered,
                outcome.startswith("better"),
                outcome.startswith("worse"),
                risen.startswith("worse"),
            )
            if not same.is_dominated:
                outcomes["unknown at 0"] += outcome == "unknown"
                outcomes["unknown at the rise"] += risen == "unknown"
    rates = {rule: [round(float(100 * one / draws), 2) for one in counts[rule]] for rule in RULES}
    return {
        **{rule: rates[rule] for rule in RULES},
        **{name: round(100 * count / draws, 2) for name, count in outcomes.items()},
    }


@cache
def quantile(level: float, degrees: float) -> float:
    return float(t_quantile(level, degrees))


def rounded_quantile(level: float, degrees: float) -> float:
    """Student's quantile, faster for thousands of degrees of freedom that hardly differ."""
    return quantile(level, round(degrees, 2 if degrees < 20 else 0))


def tally(low: Floats, high: Floats, truth: float, rise: float) -> Floats:
    """Intervals that cover the truth, are below it, above it, and above it after a rise."""
    return np.array(
        [
            ((low <= truth) & (truth <= high)).sum(),
            (high < truth).sum(),
            (low > truth).sum(),
            (low + rise > truth).sum(),
        ],
        np.float64,
    )


def documents(draw: np.random.Generator, case: Case, draws: int) -> tuple[Floats, Floats]:
    """Bits before, and log(after / before), of each document [draws, documents]."""
    count, shape, dependence, noise = case
    sizes = sizes_of(draw, shape, (draws, count))
    logs = np.log(sizes)
    standard = (logs - logs.mean()) / logs.std()
    # Half of a document's noise is its own; that of its windows is averaged.
    own = np.sqrt(0.5 + 0.5 / np.ceil(sizes / WINDOW))
    values = dependence * standard + math.sqrt(1 - dependence**2) * own * noise_of(
        draw, noise, sizes
    )
    bits = sizes * draw.normal(1, 0.1, sizes.shape)
    return bits, SPREAD * values


def sizes_of(draw: np.random.Generator, shape: str, size: tuple[int, int]) -> Floats:
    """Bytes of documents; those of more than four average ones are drawn again, as they are left out."""
    if shape.startswith("one"):
        sizes = AVERAGE * draw.lognormal(0, 1, size)
        sizes[:, 0] = sizes[:, 1:].sum(1) * 0.3 / 0.7
        return sizes

    def drawn(number: int) -> Floats:
        if shape.startswith("Pareto"):
            return 1000 * (1 - draw.random(number) * (1 - 1000**-1.2)) ** (-1 / 1.2)
        return AVERAGE * draw.lognormal(0, float(shape.split()[1]), number)

    sizes = drawn(math.prod(size))
    limit = LARGEST_OF_AVERAGE * drawn(1_000_000).mean()
    while (is_long := sizes > limit).any():
        sizes[is_long] = drawn(int(is_long.sum()))
    return sizes.reshape(size)


def noise_of(draw: np.random.Generator, noise: str, sizes: Floats) -> Floats:
    """Of mean 0 and standard deviation 1."""
    if noise == "normal":
        return draw.normal(size=sizes.shape)
    variance = math.exp(0.75**2)
    values = draw.lognormal(0, 0.75, sizes.shape) - math.sqrt(variance)
    return values / math.sqrt((variance - 1) * variance)


def verdict_on(bits: Floats, logs: Floats) -> paired.Difference:
    """The product's own comparison of one held-out set."""
    num_bytes = np.maximum(1, bits).astype(np.int64)
    hashes = np.arange(len(bits), dtype=np.uint64)
    before, after = (
        DocumentLosses(hashes, num_bytes, nats, num_bytes // 4, num_bytes // 10)
        for nats in (bits, bits * np.exp(logs))
    )
    return bits_per_byte_difference([before], [after])


# --- other rules ---


def students(_: np.random.Generator, logs: Floats) -> tuple[Floats, Floats]:
    count = logs.shape[1]
    reach = rounded_quantile(0.95, count - 1.0) * logs.std(1, ddof=1) / math.sqrt(count)
    return logs.mean(1) - reach, logs.mean(1) + reach


def bootstrap(draw: np.random.Generator, logs: Floats) -> tuple[Floats, Floats]:
    """The bootstrap-t interval; all draws share their resamples."""
    count = logs.shape[1]
    weights = draw.multinomial(count, np.full(count, 1 / count), RESAMPLES).astype(np.float64)
    mean, error = logs.mean(1), logs.std(1, ddof=1) / math.sqrt(count)
    residuals = logs - mean[:, None]
    means = residuals @ weights.T / count
    variances = np.maximum((residuals**2) @ weights.T / count - means**2, 1e-30)
    low, high = np.quantile(means / np.sqrt(variances / (count - 1)), [0.025, 0.975], axis=1)
    return mean - high * error, mean - low * error


def signed_rank(_: np.random.Generator, logs: Floats) -> tuple[Floats, Floats]:
    """Wilcoxon's test of 0 and of the rise, as ends of 0 width that `tally` reads in the same way."""
    count = logs.shape[1]
    center, spread = count * (count + 1) / 4, math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    ranks = np.abs(logs).argsort(1).argsort(1) + 1
    score = ((ranks * (logs > 0)).sum(1) - center) / spread
    ranks = np.abs(logs + math.log1p(TRUE_RISE)).argsort(1).argsort(1) + 1
    risen = ((ranks * (logs + math.log1p(TRUE_RISE) > 0)).sum(1) - center) / spread
    limit = paired.NORMAL_QUANTILE
    tiny = 1e-12
    low = np.where(score > limit, tiny, np.where(risen > limit, -tiny, -1.0))
    high = np.where(score < -limit, -tiny, 1.0)
    return low, high


def interval_of_bytes(bits: Floats, changes: Floats) -> tuple[Floats, Floats]:
    ends = [
        paired.moments_of_ratio(one_bits * one, one_bits).interval()
        for one_bits, one in zip(bits, changes, strict=True)
    ]
    low, high = np.array(ends).T
    return low, high


INTERVALS: dict[str, Callable[[np.random.Generator, Floats], tuple[Floats, Floats]]] = {
    "paired t": students,
    "signed rank": signed_rank,
    "bootstrap-t": bootstrap,
}


# --- results ---


def results_text(found: dict[Case, Rates], asked: argparse.Namespace) -> str:
    rows = []
    for noise in NOISES:
        cells = {case: rates for case, rates in found.items() if case[3] == noise}
        for rule in RULES:
            covered = [rates[rule][0] for rates in cells.values()]
            false = [max(rates[rule][1:3]) for rates in cells.values()]
            name = f"{noise} changes, {rule}"
            is_ours = rule == "documents" and noise == "normal"
            low, high, most = min(covered), max(covered), max(false)
            rows += [
                row(f"{name}: coverage, lowest", "93 to 97", low, low >= 93, is_ours),
                row(f"{name}: coverage, highest", "93 to 97", high, high <= 97, is_ours),
                row(f"{name}: false direction, highest", "<= 3 each", most, most <= 3, is_ours),
            ]
            at_43 = min(rates[rule][3] for case, rates in cells.items() if case[0] == 43)
            rows.append(
                row(
                    f"{name}: true +1 % found, 43 documents, lowest",
                    ">= 95",
                    at_43,
                    at_43 >= 95,
                    is_ours,
                )
            )
    unknown = max(
        rates["unknown at 0"] for case, rates in found.items() if case[0] > paired.FEW_TO_EXCLUDE
    )
    name = "unknown at a true 0, more than 8 documents, none dominant: highest"
    rows.append(row(name, "0", unknown, unknown == 0, True))
    lines = [
        json.dumps(
            {
                **dict(zip(("count", "sizes", "dependence", "noise"), case, strict=True)),
                **rates,
            }
        )
        for case, rates in found.items()
    ]
    head: dict[str, Any] = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "libraries": {"numpy": np.__version__},
        "seed": asked.seed,
        "draws of a case": asked.draws,
        "of each rule": ["covered", "better at a true 0", "worse at a true 0", "found at +1 %"],
        "measurements": rows,
    }
    return (
        json.dumps(head, indent=1)[:-2] + ',\n "cases": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
    )


def row(name: str, target: str, measured: float, met: bool, has_target: bool) -> dict[str, Any]:
    """A measurement in percent; other rules have no target."""
    found = {"name": name, "target": target if has_target else None, "measured": measured}
    return {**found, "unit": "%", "met": met if has_target else None}


if __name__ == "__main__":
    main()
