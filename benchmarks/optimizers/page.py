"""`python -m benchmarks.optimizers.page`: the table of docs/optimizers.md, made from
benchmarks/results/optimizers.json."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.marked import with_part
from benchmarks.optimizers.training import ARMS

RESULTS = Path(__file__).parents[1] / "results" / "optimizers.json"
PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
BEGIN, END = (
    "<!-- python -m benchmarks.optimizers.page: begin -->\n",
    "<!-- python -m benchmarks.optimizers.page: end -->\n",
)


def write_page() -> None:
    PAGE.write_text(
        with_part(PAGE.read_text(encoding="utf-8"), BEGIN, END, table(json.loads(RESULTS.read_text())), PAGE.name)
    )


def table(results: dict[str, Any]) -> str:
    """An arm in each line, a learning rate in each column."""
    rows, rates = results["rows"], results["rates"]
    head = ["weights and optimizer", "bytes a weight", *(f"rate {rate:g}" for rate in rates)]
    lines = [head, ["---"] * len(head)]
    for arm in ARMS:
        cells = [arm.name, f"{arm.bytes_each:g}"]
        for rate in rates:
            mine = [row for row in rows if row["arm"] == arm.name and row["rate"] == rate]
            off = mean(row["loss"] - row["fp32_loss"] for row in mine)
            cells.append(f"{off:+.4f} ({mean(row['alike'] for row in mine):.2f})")
        lines.append(cells)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    write_page()
