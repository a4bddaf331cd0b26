"""`python -m benchmarks.optimizers.page`: write the table of results/optimizers.json into benchmarks/README.md."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.optimizers.training import ARMS
from benchmarks.readme import write_part

RESULTS = Path(__file__).parents[1] / "results" / "optimizers.json"


def write_page() -> None:
    write_part("benchmarks.optimizers.page", table(json.loads(RESULTS.read_text())))


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
