"""Write benchmarks/results/vocabulary.json, and its tables in benchmarks/README.md:
`python -m benchmarks.vocabulary.results`."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.readme import table, write_part
from benchmarks.vocabulary.training import KINDS, OWN, Result

RESULTS = Path(__file__).parents[1] / "results" / "vocabulary.json"
LIBRARIES = ("torch", "transformers", "tokenizers")
Rows = list[dict[str, float | str]]


def write_results(lengths: Rows, added: int, results: Sequence[Result], starts: Rows) -> None:
    """Write each run, their sums and the comparisons with the targets."""
    content: dict[str, Any] = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "added": added,
        "lengths": lengths,
        "starts": starts,
        "arms": summarize(results),
        "runs": [asdict(result) for result in results],
    }
    content["measurements"] = measurements(content)
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def summarize(results: Sequence[Result]) -> dict[str, dict[str, float]]:
    """Of each arm: what it cost, and bits per byte before and after with their standard deviation over seeds."""
    arms = {}
    for arm in dict.fromkeys(result.arm for result in results):
        runs = [asdict(result) for result in results if result.arm == arm]
        figures: dict[str, float] = {"seeds": len(runs), **runs[0]["budget"]}
        for key in (f"{kind}_{end}" for kind in KINDS for end in ("before", "after")):
            values = [float(run[key]) for run in runs]
            figures |= {
                key: mean(values),
                f"{key}_deviation": stdev(values) if len(values) > 1 else 0.0,
            }
        arms[arm] = figures
    return arms


def measurements(content: dict[str, Any]) -> list[dict[str, Any]]:
    """Changes in percent; that of the demo's tokenizer has a target."""
    rows, own = [], content["arms"][OWN]
    for name in dict.fromkeys(row["tokenizer"] for row in content["lengths"]):
        by_size = {row["added"]: row for row in content["lengths"] if row["tokenizer"] == name}
        gain = percent(by_size[content["added"]]["domain"], by_size[0]["domain"])
        target, met = (">= 10", gain >= 10) if name == "of prose" else (None, None)
        what = (
            f"bytes per token on held-out code, tokenizer {name}, {content['added']} tokens added"
        )
        rows.append({"name": what, "target": target, "measured": gain, "unit": "%", "met": met})
    for arm in [arm for arm in content["arms"] if arm != OWN]:
        for kind in KINDS:
            change = percent(content["arms"][arm][f"{kind}_after"], own[f"{kind}_after"])
            what = f"{kind} bits per byte against own tokens: {arm}"
            rows.append(
                {"name": what, "target": None, "measured": change, "unit": "%", "met": None}
            )
    return rows


def percent(value: float, before: float) -> float:
    return 100 * (value / before - 1)


def write_tables() -> None:
    results = json.loads(RESULTS.read_text())
    tables = "\n".join([lengths_table(results), arms_table(results), starts_table(results)])
    write_part("benchmarks.vocabulary.results", tables)


def lengths_table(results: dict[str, Any]) -> str:
    """Bytes per token by the number of tokens added."""
    heads = (
        "tokenizer",
        "tokens added",
        "bytes per token, held-out code",
        "",
        "held-out prose",
        "",
    )
    plain = {row["tokenizer"]: row for row in results["lengths"] if row["added"] == 0}
    rows = []
    for row in results["lengths"]:
        cells = [row["tokenizer"], f"{row['added']:,}"]
        for kind in KINDS:
            change = f"{percent(row[kind], plain[row['tokenizer']][kind]):+.1f} %"
            cells += [f"{row[kind]:.3f}", change if row["added"] else ""]
        rows.append(cells)
    return table(heads, rows)


def arms_table(results: dict[str, Any]) -> str:
    """Bits per byte of each arm, before and after."""
    arms, own = results["arms"], results["arms"][OWN]
    first = f"continued training ({int(own['seeds'])} seeds, ± their standard deviation)"
    before = ("tokens", "MB of text", "FLOPs", "code, bits per byte before")
    rows = []
    for arm, found in arms.items():
        change = (
            "" if arm == OWN else f"{percent(found['domain_after'], own['domain_after']):+.1f} %"
        )
        code, prose = (
            f"{found[f'{kind}_after']:.3f} ± {found[f'{kind}_after_deviation']:.3f}"
            for kind in KINDS
        )
        spent = (f"{found['tokens']:,.0f}", f"{found['bytes'] / 1e6:.2f}", f"{found['flops']:.2e}")
        rows.append([arm, *spent, f"{found['domain_before']:.3f}", code, change, prose])
    return table((first, *before, "after", "change", "prose, after"), rows)


def starts_table(results: dict[str, Any]) -> str:
    """Bits per byte before any training, by how new rows were made."""
    names = {
        OWN: "its own tokens",
        "mean": "extended, rows: mean",
        "token_distillation": "extended, rows: token distillation",
    }
    heads = ("a model with untied embeddings, before any training", "code, bits per byte", "prose")
    rows = [
        (names[row["start"]], f"{row['domain']:.3f}", f"{row['general']:.3f}")
        for row in results["starts"]
    ]
    return table(heads, rows)


if __name__ == "__main__":
    write_tables()
