"""From what the parts found to benchmarks/results/faults.json: figures beside their targets."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "faults.json"
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")
Parts = dict[str, Any]
Row = dict[str, Any]


def results_of(parts: Parts) -> dict[str, Any]:
    """All that the page and a reader need."""
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "python": platform.python_version(),
        "libraries": {name: metadata.version(name) for name in LIBRARIES},
        "measurements": measurements(parts),
        "parts": parts,
    }


def measurements(parts: Parts) -> list[Row]:
    """Of the parts that were run."""
    rows: list[Row] = []
    if "kills" in parts:
        rows += of_kills([one for one in parts["kills"]["found"] if one["system"] == "cpt"])
    for part, names in {"damage": "damaged files", "signals": "signals"}.items():
        if part in parts:
            rows += of_trials(f"{names}: trials that did not come out as they should", parts[part]["found"])
    for part in ("steps", "disks", "processes"):
        for fault in dict.fromkeys(row["fault"] for row in parts.get(part, {}).get("found", [])):
            mine = [row for row in parts[part]["found"] if row["fault"] == fault]
            rows += of_trials(f"{fault}: trials that did not come out as they should", mine)
    if "time" in parts:
        rows += of_time(parts["time"]["found"])
    return rows


def of_kills(runs: list[Row]) -> list[Row]:
    """Over all kinds of runs."""
    kills, inside = sum(one["kills"] for one in runs), sum(one["inside_saves"] for one in runs)
    seconds = min(min(one["save_seconds"]) for one in runs)
    return [
        measurement("SIGKILLs", ">= 200", kills, "kills", kills >= 200),
        measurement("of them inside a save", ">= 0.5", round(inside / max(1, kills), 3), "share", 2 * inside >= kills),
        measurement("the shortest save", ">= 2", seconds, "s", seconds >= 2),
        none_of("failed resumes after a kill", sum(one["failed_resumes"] for one in runs)),
        none_of("steps with lost or repeated rows", sum(one["wrong_samples"] for one in runs)),
        none_of("killed runs with other weights or losses", sum(one["other_weights"] + one["other_losses"] for one in runs)),
        none_of("killed runs that did not come to their end", sum(one["unfinished"] for one in runs)),
    ]


def of_trials(name: str, rows: list[Row]) -> list[Row]:
    """Ours; none may come out badly."""
    mine = [row for row in rows if row["system"] == "cpt"]
    trials, good = sum(row["trials"] for row in mine), sum(row["good"] for row in mine)
    return [none_of(f"{name}, of {trials}", trials - good)] if mine else []


def of_time(found: Row) -> list[Row]:
    """Supervised jobs."""
    failures = sum(job["failures"] for job in found["jobs"])
    hours, minutes = found["seconds_between_failures"] / 3600, found["seconds_between_saves"] / 60
    rates = f"a failure every {hours:.1f} hours, a save every {minutes:.0f} minutes"
    return [
        measurement("seconds that a failure costs, measured", None, round(found["seconds_per_failure"], 1), "s", None),
        measurement(f"effective training time at {rates}", ">= 97", round(100 * found["effective"], 2), "%", found["effective"] >= 0.97),
        measurement(
            f"failed jobs, of {len(found['jobs'])} with {failures} failures",
            "< 1",
            round(100 * found["failed_jobs"], 2),
            "%",
            found["failed_jobs"] < 0.01,
        ),
    ]


def none_of(name: str, count: int) -> Row:
    """There should be none."""
    return measurement(name, "0", count, "", count == 0)


def measurement(name: str, target: str | None, measured: float, unit: str, met: bool | None) -> Row:
    """A row of the results."""
    return {"name": name, "target": target, "measured": measured, "unit": unit, "met": met}
