"""`python -m benchmarks.packing`: real tokens a second of supervised fine-tuning, packed and padded. Five minutes on
one core.

The systems take turns, each a short run on the same conversations, whose lengths are log-normal. Compared is the
processor time of a real token (one that is not padding) within a turn. Writes benchmarks/results/packing.json and its
table in benchmarks/README.md.
"""

import argparse
import json
import os
import platform
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measurement import measurement
from benchmarks.packing.systems import (
    CONVERSATIONS,
    MEDIAN,
    SEQUENCE_LENGTH,
    SIGMA,
    SYSTEMS,
    prepare,
)
from benchmarks.readme import table, write_part

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "packing.json"
OURS, TARGET = "cpt, packed", 0.5
PADDED = ("cpt, padded to the row", "TRL's SFTTrainer, padded to the longest")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="in a turn")
    parser.add_argument("--write", type=Path, default=RESULTS)
    asked = parser.parse_args()
    samples: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        os.environ["CPT_CACHE"] = str(folder / "cache")
        prepare(folder)
        for turn in range(asked.turns):
            for name, run in SYSTEMS.items():
                done = run(folder, asked.steps, turn)
                samples[name].append(1e6 * done.seconds / done.tokens)
    results = results_of(samples)
    for row in results["measurements"]:
        print(f"{row['name']}: {row['measured']:.3f} {row['quartiles']}")
    asked.write.write_text(json.dumps(results, indent=1) + "\n")
    if asked.write == RESULTS:
        write_part("benchmarks.packing", part(results))


def results_of(samples: dict[str, list[float]]) -> dict[str, Any]:
    """Ratios within each turn, with the raw samples: processor microseconds of a real token."""
    rows = []
    for name, times in samples.items():
        if name == OURS:
            continue
        pairs = [own / other for own, other in zip(samples[OURS], times, strict=True)]
        rows.append(
            measurement(
                f"{OURS} / {name}: time of a real token",
                TARGET if name in PADDED else None,
                pairs,
                "ratio",
            )
        )
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers", "trl")},
        "conversations": {
            "number": CONVERSATIONS,
            "median": MEDIAN,
            "sigma": SIGMA,
            "sequence_length": SEQUENCE_LENGTH,
        },
        "measurements": rows,
        "samples": samples,
    }


def part(results: dict[str, Any]) -> str:
    heads = [
        "supervised fine-tuning, processor time of a real token",
        "target",
        "median",
        "quartiles",
    ]
    rows = [
        [
            row["name"],
            row["target"] or "",
            f"{row['measured']:.2f}",
            "{:.2f} to {:.2f}".format(*row["quartiles"]),
        ]
        for row in results["measurements"]
    ]
    return table(heads, rows)


if __name__ == "__main__":
    main()
