"""`python -m benchmarks.scale.page`: write the tables of results/scale.json into benchmarks/README.md."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.readme import table, write_part

RESULTS = Path(__file__).parents[1] / "results" / "scale.json"
COUNTS = {
    "text files of 1 GiB": "files",
    "shards": "shards",
    "chunks": "chunks",
    "documents": "documents",
    "rows": "rows",
}
BYTES = {
    "tokens on the disk, 4 bytes each": "tokens",
    "documents: position, hash and size of each": "documents",
    "packing: the pieces of each row": "packing",
    "lists of shards": "manifests",
    "chunks: a file each and their table": "chunks",
}
OF_INDEX = ("documents", "packing", "manifests", "chunks")
TIMES = {
    "start of a process": "start",
    "a row at any position": "lookup_anywhere",
    "the next row": "lookup_next",
}
RESUME = "first batch of a new process, at any row"
MEMORY = {
    "memory of a process after its start": "memory_start",
    "memory after reading rows at any position": "memory_read",
}
UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def write_page() -> None:
    write_part("benchmarks.scale.page", part(json.loads(RESULTS.read_text())))


def part(results: dict[str, Any]) -> str:
    """Counts and bytes on the disk; times relative to those of the smallest size; memory."""
    cells = results["cells"]
    heads = ["", *(f"{cell['tokens']:.0e} tokens" for cell in cells)]
    there = [[name, *(f"{cell[key]:,}" for cell in cells)] for name, key in COUNTS.items()]
    there += [
        [name, *(in_units(cell["index"][key]) for cell in cells)] for name, key in BYTES.items()
    ]
    index = [
        sum(cell["index"][key] for key in OF_INDEX) / cell["index"]["tokens"] for cell in cells
    ]
    there.append(["whole index, relative to the tokens", *(f"{share:.2%}" for share in index)])
    costs = [
        [name, *times([cell[key] / cell["copy"] for cell in cells])] for name, key in TIMES.items()
    ]
    costs.insert(1, [RESUME, *times([median(cell["resume"]) / cell["copy"] for cell in cells])])
    costs += [
        [name, *(f"{cell[key] / 2**20:,.0f} MiB" for cell in cells)] for name, key in MEMORY.items()
    ]
    costs.append(
        ["the data's part of a checkpoint", *(f"{cell['state'] / 1000:.1f} kB" for cell in cells)]
    )
    off = [f"{cell['off_points']['1.0']:.3f}" for cell in cells]
    costs.append(["error of token shares at the end, points", *off])
    return f"{table(heads, there)}\n{table(heads, costs)}"


def times(values: list[float]) -> list[str]:
    """Values relative to that of the smallest size."""
    ratios = [value / values[0] for value in values]
    return [f"{ratio:.2g} x" if ratio < 100 else f"{ratio:.0f} x" for ratio in ratios]


def in_units(num_bytes: float) -> str:
    """A size that people read."""
    for size, unit in UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


if __name__ == "__main__":
    write_page()
