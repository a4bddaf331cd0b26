"""`python -m benchmarks.monitoring`: what watching a run costs in a step: 8 minutes on one core.

Turns of steps with and without all that watches follow each other in the same run. A small model, of which the cost is
a large part, shows
all of it but what grows with the model: the losses of single rows. These are timed by themselves in a larger model, of
whose step the sum is a share. Writes benchmarks/results/monitoring.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measurement import measurement
from benchmarks.monitoring import steps as program
from benchmarks.monitoring.steps import STEPS_OF_A_TURN, prepare

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "monitoring.json"
TARGET = 0.5  # percent of a step
Samples = list[dict[str, float]]


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.monitoring", description=__doc__)
    parser.add_argument(
        "--turns", type=int, default=240, help="of the small model, one in two watched; a twentieth of the medium one"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(folder)
        samples = {
            size: run(folder, size, turns)
            for size, turns in {"small": asked.turns, "medium": max(5, asked.turns // 20)}.items()
        }
    results = results_of(samples)
    RESULTS.with_name("monitoring_samples.json").write_text(json.dumps(results.pop("samples")) + "\n")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def run(folder: Path, size: str, turns: int) -> Samples:
    """One run in a process of its own."""
    out = folder / f"{size}.json"
    steps = STEPS_OF_A_TURN[size] * (turns + 1) + 1
    words = [sys.executable, str(Path(program.__file__)), str(folder), str(out), size, str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    subprocess.run(words, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    samples: Samples = json.loads(out.read_text())
    return samples


def results_of(samples: dict[str, Samples]) -> dict[str, Any]:
    """Figures beside the target, with the raw samples."""
    small, medium = samples["small"], samples["medium"]
    inside = {size: [one["inside"] for one in taken if one["watched"]] for size, taken in samples.items()}
    rows = []
    for clock in ("processor", "wall"):
        step = median(one[clock] for one in medium if not one["watched"])
        costs = added(small, clock)
        of_the_model = max(0.0, median(inside["medium"]) - median(inside["small"]))  # what grows with it
        shares = [100 * (cost + of_the_model) / step for cost in costs]
        rows += [
            measurement(
                f"all that watches, share of a step of {1e3 * step:.0f} ms ({clock} time)", TARGET, shares, "%"
            ),
            measurement(
                f"all that watches, in a step of the small model ({clock} time)",
                None,
                [1e6 * cost for cost in costs],
                "microseconds",
            ),
        ]
    shares = [100 * seconds / step for seconds in inside["medium"]]
    rows.append(
        measurement(
            "of it in the callbacks and the model's hook, timed in the medium model's steps", TARGET, shares, "%"
        )
    )
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers", "accelerate", "psutil")},
        "measurements": rows,
        "samples": samples,
    }


def added(sample: Samples, clock: str) -> list[float]:
    """Seconds that each step of a watched turn takes more than those of its neighbours do."""
    return [
        here[clock] - (before[clock] + after[clock]) / 2
        for before, here, after in zip(sample, sample[1:], sample[2:], strict=False)
        if here["watched"]
    ]


if __name__ == "__main__":
    main()
