"""`python -m benchmarks.scale.page`: the tables of docs/scaling.md and its plot, made from
benchmarks/results/scale.json."""

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.marked import with_part

RESULTS = Path(__file__).parents[1] / "results" / "scale.json"
PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"
PICTURE = PAGE.parent / "pictures" / "scaling.png"
BEGIN, END = "<!-- python -m benchmarks.scale.page: begin -->\n", "<!-- python -m benchmarks.scale.page: end -->\n"
UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def write_page() -> None:
    """Write the part between the markers, and the picture."""
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, part(results), PAGE.name))
    draw(results["cells"], PICTURE)


def part(results: dict[str, Any]) -> str:
    """What there is, what it costs, and what was asked of it."""
    return "\n".join(
        map(
            as_table,
            (what_there_is(results["cells"]), what_it_costs(results["cells"]), targets(results["measurements"])),
        )
    )


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
    lines.append(["start of a process", *times(cells, [cell["start"] / cell["copy"] for cell in cells])])
    lines.append(
        [
            "the same, were each window's file read",
            *times(cells, [one["start"] / one["copy"] for one in by_files(cells)], of_tables(cells)),
        ]
    )
    lines.append(
        [
            "first batch of a new process, at any row",
            *times(cells, [median(cell["resume"]) / cell["copy"] for cell in cells]),
        ]
    )
    lines.append(["a row anywhere", *times(cells, [cell["lookup_anywhere"] / cell["copy"] for cell in cells])])
    lines.append(["the next row", *times(cells, [cell["lookup_next"] / cell["copy"] for cell in cells])])
    lines.append(
        ["memory of a process after its start", *(f"{cell['memory_start'] / 2**20:,.0f} MiB" for cell in cells)]
    )
    lines.append(
        [
            "the same, were each window's file read",
            *(f"{one['memory_start'] / 2**20:,.0f} MiB" for one in by_files(cells)),
        ]
    )
    lines.append(["memory after rows from anywhere", *(f"{cell['memory_read'] / 2**20:,.0f} MiB" for cell in cells)])
    lines.append(["the data's part of a checkpoint", *(f"{cell['state'] / 1000:.1f} kB" for cell in cells)])
    lines.append(
        ["shares of tokens at the end, off by points", *(f"{cell['off_points']['1.0']:.3f}" for cell in cells)]
    )
    return lines


def by_files(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without tables."""
    return [cell["by_files"] for cell in cells]


def of_tables(cells: list[dict[str, Any]]) -> float:
    """What starts are told in: that of the smallest size."""
    return float(cells[0]["start"] / cells[0]["copy"])


def times(cells: list[dict[str, Any]], values: list[float], unit: float | None = None) -> list[str]:
    """Values beside that of the smallest size."""
    return [
        f"{value / (unit or values[0]):.2g} x"
        if value < 100 * (unit or values[0])
        else f"{value / (unit or values[0]):.0f} x"
        for value in values
    ]


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


def as_table(lines: list[list[str]]) -> str:
    """Markdown."""
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rest))


def draw(cells: list[dict[str, Any]], path: Path) -> None:
    """How costs grow with the tokens."""
    import matplotlib  # an extra

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = [cell["tokens"] for cell in cells]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4))
    lines = {
        "start of a process": [cell["start"] / cell["copy"] for cell in cells],
        "first batch at any row": [median(cell["resume"]) / cell["copy"] for cell in cells],
        "a row anywhere": [cell["lookup_anywhere"] / cell["copy"] for cell in cells],
        "the next row": [cell["lookup_next"] / cell["copy"] for cell in cells],
    }
    for name, values in lines.items():
        left.plot(tokens, [value / values[0] for value in values], marker="o", label=name)
    before = [one["start"] / one["copy"] / of_tables(cells) for one in by_files(cells)]
    left.plot(tokens, before, marker="o", linestyle=":", color="grey", label="start, were each window's file read")
    left.plot(tokens, [number / tokens[0] for number in tokens], color="lightgrey", label="as many times as tokens")
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="time, beside the smallest size")
    for name, key in (
        ("packing", "packing"),
        ("documents", "documents"),
        ("lists of shards", "manifests"),
        ("windows", "windows"),
    ):
        right.plot(tokens, [cell["index"][key] for cell in cells], marker="o", label=f"{name}, on the disk")
    right.plot(
        tokens, [cell["memory_start"] for cell in cells], marker="s", color="black", label="memory of a process"
    )
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="bytes")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    write_page()
