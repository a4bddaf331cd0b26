"""Break the lines of lines.yaml: a regular expression that matches once in all of cpt/, and its replacement.

Each lists the tests that should notice, promises first.
"""

import ast
import json
import re
import shlex
import time
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.mutations import running
from benchmarks.mutations.covering import NEEDS_MORE, ROOT

LINES, RESULTS = Path(__file__).with_name("lines.yaml"), ROOT / "benchmarks/results/mutations.json"
Row = dict[str, Any]


@dataclass(frozen=True)
class Guarded:
    """A line and how to break it."""

    area: str
    breaks: str
    """What goes wrong, in one sentence."""
    pattern: str
    """White space in it matches any white space, line breaks included, or none."""
    replacement: str
    tests: tuple[str, ...]
    """Arguments of pytest, relative to tests/; the next is run where the one before notices nothing."""

    def matches(self) -> list[tuple[str, str]]:
        """For each match, its file and the file's text with the match replaced."""
        regex = re.compile(re.sub(r"[ \n]+", r"\\s*", self.pattern.strip()))
        return [
            (path, text[: found.start()] + found.expand(self.replacement) + text[found.end() :])
            for path, text in sources().items()
            for found in regex.finditer(text)
        ]


@cache
def sources() -> dict[str, str]:
    """All files of cpt/ with their text."""
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for path in sorted((ROOT / "cpt").rglob("*.py"))
    }


def read_lines() -> list[Guarded]:
    """All of lines.yaml."""
    areas = yaml.safe_load(LINES.read_text()).items()
    return [
        Guarded(area, one["breaks"], one["line"], one["with"], tuple(one["tests"]))
        for area, listed in areas
        for one in listed
    ]


def try_lines(only: str, workers: int, scratch: Path) -> int:
    """Break each line whose sentence, area or file matches; returns the exit code."""
    chosen = []
    for line in read_lines():
        files = [path for path, _ in line.matches()]
        if re.search(only, "\n".join([line.breaks, line.area, *files])):
            chosen.append(line)
    rows: dict[str, Row] = {}
    with running.workers(workers, scratch) as pool:
        for line, result in running.each(pool, try_line, chosen):
            row = result if isinstance(result, dict) else row_of(line, "untested", repr(result))
            rows[line.breaks] = row
            write_results(rows)
            outcome = row["noticed_by"] or row["error"]
            print(
                f"{row['status']:8} {row['seconds']:5.1f} s  {line.breaks}: {outcome}", flush=True
            )
        noticing = sorted({row["noticed_by"] for row in rows.values()} - {""})
        for test in pool.submit(running.failing_unbroken, noticing).result():
            for row in rows.values():
                if row["noticed_by"] == test:
                    row |= {"status": "survived", "noticed_by": "", "error": f"{test} fails anyway"}
    print(json.dumps(write_results(rows)))
    return int(any(row["status"] != "noticed" for row in rows.values()))


def row_of(line: Guarded, status: str, error: str = "") -> Row:
    """A row of the results."""
    about = {"breaks": line.breaks, "area": line.area, "file": ""}
    return about | {"status": status, "noticed_by": "", "error": error, "seconds": 0.0}


def try_line(line: Guarded) -> Row:
    """Break the line in this worker's copy and run its tests."""
    matches, begin = line.matches(), time.monotonic()
    if len(matches) != 1:
        return row_of(line, "stale", f"the pattern matches {len(matches)} times")
    path, text = matches[0]
    ast.parse(text)  # a syntax error would be noticed by every test
    codes, outcome = [], running.Outcome(0)
    with running.broken(path, text):
        for tests in line.tests:
            # slow tests run where they are named
            markers = " and ".join(f"not {mark}" for mark in NEEDS_MORE)
            named = ["-m", markers] if "-k" in tests or "::" in tests else []
            outcome = running.run_tests([*named, *shlex.split(tests)])
            codes.append(outcome.code)
            if outcome.code == 1:
                break
    status = "noticed" if 1 in codes else "survived" if 0 in codes else "untested"
    seconds = round(time.monotonic() - begin, 1)
    about = {"file": path, "noticed_by": outcome.failed, "seconds": seconds}
    return row_of(line, status, outcome.error) | about


def read_results() -> Row:
    """The results so far, of lines and of seeds."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_results(new: dict[str, Row]) -> dict[str, int]:
    """Write the new rows and, for lines that were not tried now, the rows of earlier runs; returns the counts."""
    results = read_results()
    rows = {row["breaks"]: row for row in results.get("guarded", {}).get("lines", [])} | new
    lines = read_lines()
    listed = [rows[one.breaks] for one in lines if one.breaks in rows]
    counts = {"lines": len(lines), **Counter(row["status"] for row in listed)}
    by_promises = [row for row in listed if row["noticed_by"].startswith("promises/")]
    counts["noticed by a promise"] = len(by_promises)
    results["guarded"] = {"counts": counts, "lines": listed}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    return counts
