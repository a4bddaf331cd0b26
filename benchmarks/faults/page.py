"""`python -m benchmarks.faults.page`: the tables of docs/reliability.md, made from benchmarks/results/faults.json
between two markers."""

import json
from pathlib import Path
from typing import Any

from benchmarks.faults.results import RESULTS
from benchmarks.marked import with_part

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- python -m benchmarks.faults.page: begin -->\n", "<!-- python -m benchmarks.faults.page: end -->\n"
PARTS = ("damage", "signals", "steps", "disks", "processes")
DAMAGES, DAMAGE = ("truncate", "empty", "zeros", "bit flip", "missing"), "a damaged file of a checkpoint"
Row = dict[str, Any]


def write_page() -> None:
    """Write the tables between their markers."""
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def with_tables(text: str, results: dict[str, Any]) -> str:
    """A text with its part between the markers made anew."""
    return with_part(text, BEGIN, END, tables(results), PAGE.name)


def tables(results: dict[str, Any]) -> str:
    """Targets, and every fault beside what the plain Trainer does."""
    versions = ", ".join(f"{name} {version}" for name, version in results["libraries"].items())
    parts = results["parts"]
    rows = [row for name in PARTS for row in parts.get(name, {}).get("found", [])]
    measurements = [row for row in results["measurements"] if "trials that did not come out" not in row["name"]]
    shown = [f"{results['device']}; {versions}.\n", target_table(measurements)]
    shown.append(fault_table(parts.get("kills", {}).get("found", []), rows))
    return "\n".join(shown)


def target_table(measurements: list[Row]) -> str:
    """What was aimed at, and what was reached."""
    rows = [
        [
            row["name"],
            row["target"] or "",
            f"{row['measured']:g} {row['unit']}".strip(),
            {True: "yes", False: "**no**", None: ""}[row["met"]],
        ]
        for row in measurements
    ]
    return table(["", "target", "measured", "met"], rows)


def fault_table(kills: list[Row], found: list[Row]) -> str:
    """A row for each kind of fault, all kinds of runs together: trials of ours and of the plain Trainer."""
    counts: dict[str, dict[str, list[int]]] = {}
    for row in kills:
        good = row["kills"] - row["failed_resumes"]
        add(counts, "SIGKILL: the next start resumes", row["system"], good, row["kills"])
    for row in found:
        fault = row["fault"]
        kind = "a signal: saved, then the same run" if fault.startswith("SIG") else fault
        kind = DAMAGE if kind.partition(":")[0].split(",")[0] in DAMAGES else kind
        add(counts, kind, row["system"], row["good"], row["trials"])
    cells = {
        fault: [f"{of[0]} of {of[1]}" if (of := by_system.get(system)) else "" for system in ("cpt", "trainer")]
        for fault, by_system in counts.items()
    }
    return table(["fault", "cpt", "plain Trainer"], [[fault, *some] for fault, some in cells.items()])


def add(counts: dict[str, dict[str, list[int]]], fault: str, system: str, good: int, trials: int) -> None:
    of = counts.setdefault(fault, {}).setdefault(system, [0, 0])
    of[0], of[1] = of[0] + good, of[1] + trials


def table(heads: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


if __name__ == "__main__":
    write_page()
