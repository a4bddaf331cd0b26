"""`python -m benchmarks.faults.page`: the tables of docs/reliability.md, made from benchmarks/results/faults.json
between two markers."""

import json
from pathlib import Path
from typing import Any

from benchmarks.faults.results import RESULTS
from benchmarks.marked import with_part

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- python -m benchmarks.faults.page: begin -->\n", "<!-- python -m benchmarks.faults.page: end -->\n"
MOST_OUTCOMES = 3
Row = dict[str, Any]


def write_page() -> None:
    """Write the tables between their markers."""
    results = json.loads(RESULTS.read_text())
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


def with_tables(text: str, results: dict[str, Any]) -> str:
    """A text with its part between the markers made anew."""
    return with_part(text, BEGIN, END, tables(results), PAGE.name)


def tables(results: dict[str, Any]) -> str:
    """Targets, kills, and every other fault beside what the plain Trainer does."""
    versions = ", ".join(f"{name} {version}" for name, version in results["libraries"].items())
    parts = results["parts"]
    shown = [f"{results['device']}; {versions}. {codes_of(parts)}\n", target_table(results["measurements"])]
    if "kills" in parts:
        shown.append(kill_table(parts["kills"]["found"]))
    rows = [
        row
        for part in ("damage", "signals", "steps", "disks", "processes")
        for row in parts.get(part, {}).get("found", [])
    ]
    if rows:
        shown.append(fault_table(rows))
    return "\n".join(shown)


def codes_of(parts: Row) -> str:
    """Which sources of ours were measured, by their hash."""
    codes: dict[str, list[str]] = {}
    for name, part in parts.items():
        for row in part["found"]:
            codes.setdefault(row.get("code", "before they were noted"), []).append(name)
    told = [f"{code} ({', '.join(dict.fromkeys(names))})" for code, names in codes.items()]
    return f"Sources of `cpt`, by `code_of` of `benchmarks/faults/results.py`: {'; '.join(told)}."


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


def kill_table(found: list[Row]) -> str:
    """A row for each kind of run of each system."""
    heads = [
        "SIGKILL",
        "run",
        "seconds a save takes",
        "kills",
        "inside saves",
        "in the middle of",
        "failed resumes",
        "steps with wrong rows",
        "runs that differ",
    ]
    rows = []
    for one in found:
        moments = ", ".join(f"{what} {count}" for what, count in sorted(one["moments"].items()))
        differ = f"{one['other_weights'] + one['unfinished']} of {one['runs'] + one['unfinished']}"
        counts = [str(one[name]) for name in ("kills", "inside_saves")]
        bad = [str(one["failed_resumes"]), str(one["wrong_samples"]), differ]
        seconds = f"{min(one['save_seconds']):.1f} to {max(one['save_seconds']):.1f}"
        rows.append([name_of(one["system"]), one["run"], seconds, *counts, moments, *bad])
    return table(heads, rows)


def fault_table(found: list[Row]) -> str:
    """A row for each fault in each kind of run: ours, then the plain Trainer; faults of a kind that came out alike
    share one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for fault, run in dict.fromkeys((row["fault"], row["run"]) for row in found):
        cells = [
            [row for row in found if (row["fault"], row["run"], row["system"]) == (fault, run, system)]
            for system in ("cpt", "trainer")
        ]
        what, separator, rest = fault.partition(" to " if fault.startswith("SIG") else ": ")
        alike.setdefault((f"{separator}{rest}", run, *(cell(some[0]) if some else "" for some in cells)), []).append(
            what
        )
    rows = [[f"{', '.join(faults)}{rest}", run, *cells] for (rest, run, *cells), faults in alike.items()]
    return table(["fault", "run", "cpt", "plain Trainer"], rows)


def cell(row: Row) -> str:
    """How many trials came out well, and how they came out."""
    outcomes = [
        f"{what}{f' ({count})' if count > 1 else ''}" for what, count in list(row["outcomes"].items())[:MOST_OUTCOMES]
    ]
    more = len(row["outcomes"]) - MOST_OUTCOMES
    told = "; ".join(outcomes) + (f"; {more} more" if more > 0 else "")
    return f"**{row['good']} of {row['trials']}**: {told}".replace("|", "\\|")


def name_of(system: str) -> str:
    """In words."""
    return {"cpt": "cpt", "trainer": "plain Trainer"}[system]


def table(heads: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, ["---"] * len(heads), *rows))


if __name__ == "__main__":
    write_page()
