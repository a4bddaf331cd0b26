"""What does the data's index cost at two billion to two trillion tokens? `python -m benchmarks.scale`: 15 minutes on a
core, 5 GB of disk.

For each size a store is laid out (`tables.py`), then processes start on it as those of a run do, and look rows up
(`start.py`). All of it is cpt's own code on files of the real size; only the tokens have no content. Writes
benchmarks/results/scale.json; then `python -m benchmarks.scale.page` writes the tables of benchmarks/README.md.
"""

import argparse
import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.scale.tables import make_store
from cpt.cache import size_of

RESULTS = Path(__file__).parents[1] / "results" / "scale.json"
SIZES = (2 * 10**9, 2 * 10**10, 2 * 10**11, 2 * 10**12)
REPETITIONS = 3
OFF_POINTS, RESUME_GROWTH, LOOKUP_GROWTH, MEMORY = 0.1, 3.0, 3.0, 400 * 2**20


def main() -> None:
    """Measure every size, then write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="tokens")
    parser.add_argument(
        "--folder", type=Path, help="a disk with room; by default that of temporary files"
    )
    arguments = parser.parse_args()
    with TemporaryDirectory(dir=arguments.folder, prefix="cpt-scale-") as folder:
        found = [measure(Path(folder) / str(tokens), tokens) for tokens in arguments.sizes]
    RESULTS.write_text(json.dumps(results_of(found), indent=1) + "\n")


def measure(folder: Path, tokens: int) -> dict[str, Any]:
    """One size: the medians of some processes."""
    folder.mkdir()
    make_store(folder, tokens)
    with_tables = [started(folder, tokens) for _ in range(REPETITIONS)]
    index = index_bytes(folder)
    rmtree(folder)
    cell = {
        "tokens": tokens,
        **{
            name: with_tables[0][name]
            for name in ("rows", "chunks", "shards", "files", "documents", "state", "off_points")
        },
        "index": index,
        **{
            name: median(one[name] for one in with_tables)
            for name in ("copy", "start", "first_batch", "lookup_anywhere", "lookup_next")
        },
        **{
            name: median(one[name] for one in with_tables)
            for name in ("memory_start", "memory_read")
        },
        "resume": [
            median(one["resumes"][place] for one in with_tables)
            for place in range(len(with_tables[0]["resumes"]))
        ],
    }
    print(
        f"{tokens:,} tokens: start {cell['start']:.2f} s, {cell['memory_start'] / 2**20:.0f} MiB",
        flush=True,
    )
    return cell


def started(folder: Path, tokens: int) -> dict[str, Any]:
    """What a new process measured."""
    command = [sys.executable, "-m", "benchmarks.scale.start", str(folder), str(tokens)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return found


def index_bytes(folder: Path) -> dict[str, float]:
    """What is on the disk besides tokens, extrapolated from the chunks and shards that were drawn."""
    cache = folder / "cache"
    sources = list((cache / "tokens").iterdir())
    packings = [
        path for rows in (cache / "rows").iterdir() for path in rows.iterdir() if path.is_symlink()
    ]
    shards = [path for source in sources for path in source.iterdir() if path.is_symlink()]
    size: dict[Path, int] = {}
    for link in [*packings, *shards]:
        target = link.readlink()
        if target not in size:
            size[target] = size_of(target) - (
                (target / "tokens.bin").stat().st_size if (target / "tokens.bin").exists() else 0
            )
    return {
        "packing": sum(size[link.readlink()] for link in packings),
        "documents": sum(size[link.readlink()] for link in shards),
        "tokens": sum((link / "tokens.bin").stat().st_size for link in shards),
        "manifests": sum((source / "description.json").stat().st_size for source in sources),
        "chunks": sum(
            path.stat().st_size for path in (cache / "rows").glob("*/*") if path.is_file()
        ),
        "tables": sum(path.stat().st_size for path in (cache / "rows").glob("*/total.json")),
    }


def results_of(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """As a benchmark writes them."""
    first, last = cells[0], cells[-1]
    times = last["tokens"] / first["tokens"]
    resume = median(last["resume"]) / last["copy"] / (median(first["resume"]) / first["copy"])
    lookup = last["lookup_anywhere"] / last["copy"] / (first["lookup_anywhere"] / first["copy"])
    trend = median(last["resume"][-5:]) / median(last["resume"][1:6])
    off = max(
        value
        for cell in cells
        for part, value in cell["off_points"].items()
        if float(part) * cell["rows"] > 10_000
    )
    rows = [
        (
            "shares of tokens, largest difference from those asked, after 10,000 rows",
            OFF_POINTS,
            off,
            "points",
        ),
        (
            f"first batch at any row, {times:,.0f} times as many tokens",
            RESUME_GROWTH,
            resume,
            "times as long",
        ),
        (
            "first batch near the end beside near the beginning, largest size",
            1.5,
            trend,
            "times as long",
        ),
        (
            f"a row anywhere, {times:,.0f} times as many tokens",
            LOOKUP_GROWTH,
            lookup,
            "times as long",
        ),
        (
            "memory of a process after its start, largest size",
            MEMORY,
            last["memory_start"],
            "bytes",
        ),
    ]
    return {
        "device": f"{platform.machine()}, one core",
        "libraries": {name: metadata.version(name) for name in ("numpy", "grain", "torch")},
        "measurements": [
            {
                "name": name,
                "target": f"<= {target}",
                "measured": value,
                "unit": unit,
                "met": value <= target,
            }
            for name, target, value, unit in rows
        ],
        "cells": cells,
    }


if __name__ == "__main__":
    main()
