"""`python -m benchmarks.guards`: what loss guard, votes, heartbeats and signals cost in a step: 5 minutes on 2 cores.

Steps with and without them take turns in the same run. Their cost is measured on a small model, of which it is a large
part, and held against a step of a larger one. Writes benchmarks/results/guards.json.
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

from benchmarks.guards import steps as program
from benchmarks.guards.steps import prepare
from benchmarks.measurement import measurement, write_samples

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "guards.json"
TARGET = 0.5  # percent of a step
WAYS = {"one process": 1, "DDP x 2": 2}
Samples = list[dict[str, float]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guards", description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=800, help="of the small model; half of them are guarded"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        samples = measure(Path(temporary), asked.steps)
    results = results_of(samples)
    write_samples("guards", results.pop("samples"))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def measure(folder: Path, steps: int) -> dict[str, dict[str, Samples]]:
    """Samples of each way to run, by the model's size."""
    prepare(folder)
    return {
        name: {
            size: run(folder, processes, size, count)
            for size, count in {"small": steps, "medium": max(20, steps // 20)}.items()
        }
        for name, processes in WAYS.items()
    }


def run(folder: Path, processes: int, size: str, steps: int) -> Samples:
    out = folder / f"{size}-{processes}.json"
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
    ]
    words = [
        *(launcher if processes > 1 else [sys.executable]),
        str(Path(program.__file__)),
        str(folder),
        str(out),
        size,
        str(steps),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(words, cwd=ROOT, env=environment, check=True)
    samples: Samples = json.loads(out.read_text())
    return samples


def results_of(samples: dict[str, dict[str, Samples]]) -> dict[str, Any]:
    """Measurements with their target, and the raw samples."""
    rows = []
    for name, by_size in samples.items():
        for clock in ("processor", "wall"):
            costs, step = (
                added(by_size["small"], clock),
                median(one[clock] for one in by_size["medium"] if not one["guarded"]),
            )
            shares = [100 * cost / step for cost in costs]
            rows += [
                measurement(
                    f"{name}: guards and flags, share of a step of {1e3 * step:.0f} ms ({clock} time)",
                    TARGET,
                    shares,
                    "%",
                ),
                measurement(
                    f"{name}: guards and flags in a step ({clock} time)",
                    None,
                    [1e6 * cost for cost in costs],
                    "microseconds",
                ),
            ]
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "libraries": {
            name: metadata.version(name) for name in ("torch", "transformers", "accelerate")
        },
        "measurements": rows,
        "samples": samples,
    }


def added(sample: Samples, clock: str) -> list[float]:
    """Seconds that each guarded step takes more than its neighbours do."""
    return [
        here[clock] - (before[clock] + after[clock]) / 2
        for before, here, after in zip(sample, sample[1:], sample[2:], strict=False)
        if here["guarded"]
    ]


if __name__ == "__main__":
    main()
