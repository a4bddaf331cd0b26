"""From the results of the parts to benchmarks/results/faults.json: measurements with their targets."""

import fcntl
import json
import os
import platform
from collections import Counter
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from xxhash import xxh3_64

from benchmarks.faults.goodput import SECONDS_BETWEEN_FAILURES, SECONDS_BETWEEN_SAVES, effective

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed")
OF_A_ROW = ("run", "system", "fault")
Parts = dict[str, Any]
Row = dict[str, Any]


def keep(results: Path, part: str, found: list[Row], seconds: float, *, anew: bool = False) -> None:
    """Add a part's findings to those of the same code of ours; those of another code are replaced, kinds of runs left
    out stay.

    Args:
        anew: replace those of the same code too.
    """
    results.touch()
    with results.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # parts may run at the same time
        text = file.read()
        parts = json.loads(text)["parts"] if text else {}
        before = parts.get(part, {"minutes": 0.0, "found": []})
        code = code_of(ROOT / "cpt")
        known = [
            row
            for row in before["found"]
            if not anew or not any(is_of_the_same(row, one) for one in found)
        ]
        rows = added(known, [{**row, "code": code} for row in found])
        parts[part] = {"minutes": round(before["minutes"] + seconds / 60, 1), "found": rows}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(results_of(parts), indent=1) + "\n")


def code_of(folder: Path) -> str:
    """A hash of all Python below."""
    digest = xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def added(known: list[Row], found: list[Row]) -> list[Row]:
    """Rows of the same kind of run, system, fault and code become one."""
    rows = list(known)
    for new in found:
        same = [row for row in rows if is_of_the_same(row, new)]
        rows = [row for row in rows if row not in same]
        rows.append(sum_of([row for row in same if row.get("code") == new.get("code")], new))
    return rows


def is_of_the_same(one: Row, other: Row) -> bool:
    """Fault, in the same kind of run, of the same system."""
    return all(one.get(name) == other.get(name) for name in OF_A_ROW)


def sum_of(known: list[Row], new: Row) -> Row:
    """Counts and lists add up, of the steps lost the most count."""
    total = dict(new)
    for row in known:
        for name, value in row.items():
            if name == "most_steps_lost":
                total[name] = max(total[name], value)
            elif isinstance(value, dict):
                total[name] = dict((Counter(total[name]) + Counter(value)).most_common())
            elif not isinstance(value, str):
                total[name] = total[name] + value
    return total


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
            rows += of_trials(
                f"{names}: trials that did not come out as they should", parts[part]["found"]
            )
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
        measurement(
            "of them inside a save",
            ">= 0.5",
            round(inside / max(1, kills), 3),
            "share",
            2 * inside >= kills,
        ),
        measurement("the shortest save", ">= 2", seconds, "s", seconds >= 2),
        none_of("failed resumes after a kill", sum(one["failed_resumes"] for one in runs)),
        none_of("steps with lost or repeated rows", sum(one["wrong_samples"] for one in runs)),
        none_of(
            "killed runs with other weights or losses",
            sum(one["other_weights"] + one["other_losses"] for one in runs),
        ),
        none_of(
            "killed runs that did not come to their end", sum(one["unfinished"] for one in runs)
        ),
    ]


def of_trials(name: str, rows: list[Row]) -> list[Row]:
    """Ours; none may come out badly."""
    mine = [row for row in rows if row["system"] == "cpt"]
    trials, good = sum(row["trials"] for row in mine), sum(row["good"] for row in mine)
    return [none_of(f"{name}, of {trials}", trials - good)] if mine else []


def of_time(rows: list[Row]) -> list[Row]:
    """Supervised jobs."""
    jobs = [job for row in rows for job in row["jobs"]]
    costs = [cost_of(job) for job in jobs if job["failures"] and not job["failed"]]
    failures, failed = sum(job["failures"] for job in jobs), sum(job["failed"] for job in jobs)
    cost = fmean(costs) if costs else float("nan")
    rates = (
        f"a failure every {SECONDS_BETWEEN_FAILURES / 3600:.1f} hours and a save every"
        f" {SECONDS_BETWEEN_SAVES / 60:.0f} minutes"
    )
    share, jobs_failed = effective(cost), failed / len(jobs)
    return [
        measurement(
            f"seconds that a failure costs, mean of {failures}", None, round(cost, 1), "s", None
        ),
        measurement(
            "the same in the worst job", None, round(max(costs, default=cost), 1), "s", None
        ),
        measurement(
            f"effective training time with {rates}",
            ">= 97",
            round(100 * share, 2),
            "%",
            share >= 0.97,
        ),
        measurement(
            f"failed jobs, of {len(jobs)} with {failures} failures",
            "< 1",
            round(100 * jobs_failed, 2),
            "%",
            jobs_failed < 0.01,
        ),
    ]


def cost_of(job: Row) -> float:
    """Seconds of each of its failures, without the steps made again."""
    return float(job["seconds"] - job["undisturbed"] - job["again"]) / int(job["failures"])


def none_of(name: str, count: int) -> Row:
    """There should be none."""
    return measurement(name, "0", count, "", count == 0)


def measurement(name: str, target: str | None, measured: float, unit: str, met: bool | None) -> Row:
    """A row of the results."""
    return {"name": name, "target": target, "measured": measured, "unit": unit, "met": met}
