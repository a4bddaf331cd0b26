"""How long does `cpt compare` take for many long runs? `python -m benchmarks.comparing`: 3 minutes.

Runs of 100,000 logged steps with 29 figures each are written to a temporary folder, which needs 2 GB. Then the command
runs in a process of its own, start included, on the processors given by --processors. Its files are in the system's
memory; reading them from a disk adds what the disk takes. Writes benchmarks/results/comparing.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.comparing.runs import FIGURES, write_runs
from benchmarks.measurement import measurement

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "comparing.json"
TARGET = 5.0  # seconds
LIBRARIES = ("numpy", "pyarrow", "pydantic", "rich", "matplotlib")


def main() -> None:
    """Write the runs, measure, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparing", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, help="where the runs are written; by default a temporary folder"
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument(
        "--processors", type=int, nargs="+", default=[0, 1, 2, 3], help="their numbers"
    )
    asked = parser.parse_args()
    with TemporaryDirectory(dir=asked.folder) as scratch:
        folders = write_runs(Path(scratch) / "runs", asked.runs, asked.steps)
        os.sched_setaffinity(0, asked.processors)
        samples = measure(folders, Path(scratch), asked.times)
        size = sum((folder / "metrics.jsonl").stat().st_size for folder in folders)
    RESULTS.write_text(json.dumps(results_of(samples, asked, size), indent=1) + "\n")


def measure(folders: list[Path], scratch: Path, times: int) -> dict[str, list[float]]:
    """Seconds of each command by the clock."""
    paths = [str(folder) for folder in folders]
    commands = {
        "cpt compare": ["-m", "cpt.cli", "compare", *paths],
        "cpt compare --html": [
            "-m",
            "cpt.cli",
            "compare",
            *paths,
            "--html",
            str(scratch / "x.html"),
        ],
        "cpt runs": ["-m", "cpt.cli", "runs", str(folders[0].parent)],
    }
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(times):
        for name, words in commands.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *words], check=True, capture_output=True, cwd=ROOT)
            samples[name].append(time.perf_counter() - started)
    return samples


def results_of(
    samples: dict[str, list[float]], asked: argparse.Namespace, size: int
) -> dict[str, Any]:
    """Measurements with their target, and the raw samples."""
    what = f"{asked.runs} runs of {asked.steps:,} logs with {len(FIGURES) + 3} figures"
    targets = {"cpt compare": TARGET}
    rows = [
        measurement(f"{what}: {name}", targets.get(name), values, "s")
        for name, values in samples.items()
    ]
    return {
        "device": (
            f"{platform.machine()}, {len(asked.processors)} of {os.cpu_count()} cores, load at the end"
            f" {os.getloadavg()[0]:.1f}"
        ),
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "gigabytes_read": round(size / 1e9, 2),
        "measurements": rows,
        "samples": samples,
    }


if __name__ == "__main__":
    main()
