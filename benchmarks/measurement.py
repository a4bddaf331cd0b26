"""A row of a benchmark's results: the median of what was measured, its quartiles, and whether it keeps its target."""

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

SAMPLES = Path(__file__).parents[1] / "build" / "samples"
"""Raw figures are kept here, outside of the repository: thousands of lines tell a reader nothing."""


def write_samples(benchmark: str, samples: Any) -> None:
    SAMPLES.mkdir(parents=True, exist_ok=True)
    (SAMPLES / f"{benchmark}.json").write_text(json.dumps(samples) + "\n")


def measurement(name: str, target: float | None, values: list[float], unit: str) -> dict[str, Any]:
    """A row as results are written.

    Args:
        target: upper bound of the median, where there is one.
        values: two at least.
    """
    middle = median(values)
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    bound, met = (None, None) if target is None else (f"<= {target}", middle <= target)
    return {
        "name": name,
        "target": bound,
        "measured": middle,
        "quartiles": [lower, upper],
        "unit": unit,
        "met": met,
    }
