"""`python -m benchmarks.scale.page`: the tables of docs/scaling.md, made from
benchmarks/results/scale.json."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.marked import table, with_part

RESULTS = Path(__file__).parents[1] / "results" / "scale.json"
PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
BEGIN, END = "<!-- python -m benchmarks.scale.page: begin -->\n", "<!-- python -m benchmarks.scale.page: end -->\n"
UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def write_page() -> None:
    """Write the part between the markers."""
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, part(results), PAGE.name))


def part(results: dict[str, Any]) -> str:
    """What there is, what it costs, and what was asked of it."""
    parts = (what_there_is(results["cells"]), what_it_costs(results["cells"]), targets(results["measurements"]))
    return "\n".join(table(lines[0], lines[1:]) for lines in parts)


def what_there_is(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Counts, and bytes on the disk."""
    lines = [["", *(f"{cell['tokens']:.0e} tokens" for cell in cells)]]
    for name, key in (
        ("text files of 1 GiB", "files"),
        ("shards", "shards"),
        ("windows", "windows"),
        ("documents", "documents"),
        ("rows", "rows"),
    ):
        lines.append([name, *(f"{cell[key]:,}" for cell in cells)])
    for name, key in (
        ("tokens on the disk, 4 bytes each", "tokens"),
        ("documents: where each begins, its hash and size", "documents"),
        ("packing: which piece stands in which row", "packing"),
        ("lists of shards", "manifests"),
        ("what is known of windows, a file each and the table", "windows"),
    ):
        lines.append([name, *(in_units(cell["index"][key]) for cell in cells)])
    index = [
        sum(cell["index"][key] for key in ("documents", "packing", "manifests", "windows")) / cell["index"]["tokens"]
        for cell in cells
    ]
    return [*lines, ["all of the index beside the tokens", *(f"{share:.2%}" for share in index)]]


def what_it_costs(cells: list[dict[str, Any]]) -> list[list[str]]:
    """Times beside those of the smallest size, and memory."""
    lines = [["", *(f"{cell['tokens']:.0e} tokens" for cell in cells)]]
    lines.append(["start of a process", *times([cell["start"] / cell["copy"] for cell in cells])])
    lines.append(
        [
            "first batch of a new process, at any row",
            *times([median(cell["resume"]) / cell["copy"] for cell in cells]),
        ]
    )
    lines.append(["a row anywhere", *times([cell["lookup_anywhere"] / cell["copy"] for cell in cells])])
    lines.append(["the next row", *times([cell["lookup_next"] / cell["copy"] for cell in cells])])
    lines.append(
        ["memory of a process after its start", *(f"{cell['memory_start'] / 2**20:,.0f} MiB" for cell in cells)]
    )
    lines.append(["memory after rows from anywhere", *(f"{cell['memory_read'] / 2**20:,.0f} MiB" for cell in cells)])
    lines.append(["the data's part of a checkpoint", *(f"{cell['state'] / 1000:.1f} kB" for cell in cells)])
    lines.append(
        ["shares of tokens at the end, off by points", *(f"{cell['off_points']['1.0']:.3f}" for cell in cells)]
    )
    return lines


def times(values: list[float]) -> list[str]:
    """Values beside that of the smallest size."""
    ratios = [value / values[0] for value in values]
    return [f"{ratio:.2g} x" if ratio < 100 else f"{ratio:.0f} x" for ratio in ratios]


def targets(measurements: list[dict[str, Any]]) -> list[list[str]]:
    """What was asked."""
    lines = [["asked", "at most", "measured", "met"]]
    for row in measurements:
        is_bytes = row["unit"] == "bytes"
        bound = float(row["target"].removeprefix("<= "))
        shown = [
            f"{number / 2**20:,.0f} MiB" if is_bytes else f"{number:.2g} {row['unit']}"
            for number in (bound, row["measured"])
        ]
        lines.append([row["name"], *shown, "yes" if row["met"] else "no"])
    return lines


def in_units(num_bytes: float) -> str:
    """A size that people read."""
    for size, unit in UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"


if __name__ == "__main__":
    write_page()
