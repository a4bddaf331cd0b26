"""`python -m benchmarks.faults.page`: write the tables of results/faults.json into benchmarks/README.md."""

import json
from typing import Any

from benchmarks.faults.results import RESULTS
from benchmarks.readme import write_part

PARTS = ("damage", "signals", "steps", "disks", "processes")
DAMAGES, DAMAGE = (
    ("truncate", "empty", "zeros", "bit flip", "missing"),
    "a damaged file of a checkpoint",
)
Row = dict[str, Any]


def write_page() -> None:
    write_part("benchmarks.faults.page", tables(json.loads(RESULTS.read_text())))


def tables(results: dict[str, Any]) -> str:
    """Targets, and the outcome of every fault under cpt and under the plain Trainer."""
    versions = ", ".join(f"{name} {version}" for name, version in results["libraries"].items())
    parts = results["parts"]
    rows = [row for name in PARTS for row in parts.get(name, {}).get("found", [])]
    measurements = [
        row for row in results["measurements"] if "trials that did not come out" not in row["name"]
    ]
    shown = [f"{results['device']}; {versions}.\n", target_table(measurements)]
    shown.append(fault_table(parts.get("kills", {}).get("found", []), rows))
    return "\n".join(shown)


def target_table(measurements: list[Row]) -> str:
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
        fault: [
            f"{of[0]} of {of[1]}" if (of := by_system.get(system)) else ""
            for system in ("cpt", "trainer")
        ]
        for fault, by_system in counts.items()
    }
    return table(
        ["fault", "cpt", "plain Trainer"], [[fault, *some] for fault, some in cells.items()]
    )


def add(
    counts: dict[str, dict[str, list[int]]], fault: str, system: str, good: int, trials: int
) -> None:
    of = counts.setdefault(fault, {}).setdefault(system, [0, 0])
    of[0], of[1] = of[0] + good, of[1] + trials


def table(heads: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


if __name__ == "__main__":
    write_page()
