"""From the runs to benchmarks/results/vocabulary.json: means over seeds, and changes beside their targets."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.vocabulary.training import Result

RESULTS = Path(__file__).parents[1] / "results" / "vocabulary.json"
LIBRARIES = ("torch", "transformers", "tokenizers")
Rows = list[dict[str, float | str]]
OWN = "own tokens"


def write_results(lengths: Rows, added: int, results: Sequence[Result]) -> None:
    """What was measured, run by run and summed up."""
    content = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "added": added,
        "lengths": lengths,
        "arms": summarize(results),
        "runs": [asdict(result) for result in results],
    }
    content["measurements"] = measurements(content)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def summarize(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Of each arm: what it cost, bits per byte before and after, and how far seeds lie apart."""
    arms = {}
    for arm in dict.fromkeys(result.arm for result in results):
        runs = [result for result in results if result.arm == arm]
        figures: dict[str, float] = {"seeds": len(runs), **asdict(runs[0].budget)}
        for key in ("domain_before", "domain_after", "general_before", "general_after"):
            values = [float(asdict(run)[key]) for run in runs]
            figures |= {key: mean(values), f"{key}_deviation": stdev(values) if len(values) > 1 else 0.0}
        arms[arm] = figures
    return arms


def measurements(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Ratios, beside their targets where there are any."""
    rows = []
    for name in dict.fromkeys(row["tokenizer"] for row in content["lengths"]):
        by_size = {row["added"]: row for row in content["lengths"] if row["tokenizer"] == name}
        gain = 100 * (by_size[content["added"]]["domain"] / by_size[0]["domain"] - 1)
        target = ">= 10" if name == "of prose" else None
        rows.append(
            measurement(
                f"bytes per token on held-out code, tokenizer {name}, {content['added']} tokens added",
                target,
                gain,
                "%",
            )
        )
    own = content["arms"][OWN]
    for arm, figures in content["arms"].items():
        if arm != OWN:
            for kind in ("domain", "general"):
                change = 100 * (figures[f"{kind}_after"] / own[f"{kind}_after"] - 1)
                rows.append(measurement(f"{kind} bits per byte against own tokens: {arm}", None, change, "%"))
    return rows


def measurement(name: str, target: str | None, measured: float, unit: str) -> dict[str, Any]:
    """A row of the results; targets are lower bounds."""
    met = None if target is None else measured >= float(target.removeprefix(">= "))
    return {"name": name, "target": target, "measured": measured, "unit": unit, "met": met}
