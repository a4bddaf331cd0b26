"""`python -m benchmarks.step`: what the host does in a step besides the model's own operations. Two minutes on one
core.

A toy model, so small that the host is the limit, is trained by a bare loop, by the plain Trainer and by cpt with all
default guards and monitors on. The three take turns of some steps each, so that other load on the machine affects all
of them; a turn and the loop's turn before it are one pair. Processor time. Writes benchmarks/results/step.json and its
table in benchmarks/README.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.guards.steps import prepare
from benchmarks.measurement import measurement
from benchmarks.readme import table, write_part
from benchmarks.step.systems import MARK, SYSTEMS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "step.json"
TARGET = 1.05
WARMING = 3  # turns that are not counted
BARE = "a bare loop"


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--steps", type=int, default=30, help="in a turn")
    parser.add_argument("--write", type=Path, default=RESULTS)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        prepare(Path(temporary))
        seconds = measure(Path(temporary), asked.turns + WARMING, asked.steps)
    results = results_of({name: turns[WARMING:] for name, turns in seconds.items()}, asked.steps)
    for row in results["measurements"]:
        print(f"{row['name']}: {row['measured']:.3f} {row['quartiles']}")
    asked.write.write_text(json.dumps(results, indent=1) + "\n")
    if asked.write == RESULTS:
        write_part("benchmarks.step", part(results))


def measure(folder: Path, turns: int, steps: int) -> dict[str, list[float]]:
    """Processor seconds of each turn, by system."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
    }
    seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    with ExitStack() as stack:
        started = {
            name: stack.enter_context(start(name, folder, turns, steps, environment))
            for name in SYSTEMS
        }
        for turn in range(turns):
            for name, process in started.items():
                assert process.stdin is not None
                if turn:  # the first turn of each begins by itself
                    process.stdin.write("\n")
                    process.stdin.flush()
                seconds[name].append(answer(process))
        for process in started.values():
            process.communicate("\n")
    return seconds


def answer(process: subprocess.Popen[str]) -> float:
    """What it says at the end of a turn."""
    assert process.stdout is not None
    line = next(line for line in process.stdout if line.startswith(MARK))
    return float(line.removeprefix(MARK))


def start(
    name: str, folder: Path, turns: int, steps: int, environment: dict[str, str]
) -> subprocess.Popen[str]:
    """A system in a process of its own, in a folder of its own."""
    words = [
        sys.executable,
        "-m",
        "benchmarks.step.systems",
        name,
        str(folder),
        str(turns),
        str(steps),
    ]
    return subprocess.Popen(
        words, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def results_of(seconds: dict[str, list[float]], steps: int) -> dict[str, Any]:
    """Ratios of turns that were neighbours, with the raw samples."""
    bare = seconds[BARE]
    rows = [
        measurement(
            f"{name}, milliseconds of a step", None, [1e3 * turn / steps for turn in turns], "ms"
        )
        for name, turns in seconds.items()
    ]
    for name, turns in seconds.items():
        if name != BARE:
            pairs = [turn / other for turn, other in zip(turns, bare, strict=True)]
            target = TARGET if name == "cpt" else None
            rows.append(
                measurement(
                    f"{name} / {BARE}: processor time of a step, {len(pairs)} pairs",
                    target,
                    pairs,
                    "ratio",
                )
            )
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "libraries": {
            name: metadata.version(name) for name in ("torch", "transformers", "accelerate")
        },
        "steps_in_a_turn": steps,
        "median_ms": {name: 1e3 * median(turns) / steps for name, turns in seconds.items()},
        "measurements": rows,
        "samples": seconds,
    }


def part(results: dict[str, Any]) -> str:
    heads = ["processor time per step, limited by the CPU", "target", "median", "quartiles"]
    rows = [row for row in results["measurements"] if row["unit"] == "ratio"]
    cells = [
        [
            row["name"],
            row["target"] or "",
            f"{row['measured']:.3f}",
            "{:.3f} to {:.3f}".format(*row["quartiles"]),
        ]
        for row in rows
    ]
    return table(heads, cells)


if __name__ == "__main__":
    main()
