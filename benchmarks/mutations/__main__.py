"""Break guarded lines of cpt/ one at a time and check that a test notices: `python -m benchmarks.mutations`.

lines.yaml lists the lines by what breaks: a regular expression that matches once in all of cpt/, its replacement, and
the tests that should notice, promises first. The command works on copies of the repository and writes
benchmarks/results/mutations.json. It ends with exit code 1 unless every broken line was noticed.
"""

import argparse
import ast
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

ROOT = Path(__file__).parents[2]
LINES, RESULTS = Path(__file__).with_name("lines.yaml"), ROOT / "benchmarks/results/mutations.json"
IMPORTED_ONCE = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "trl",
)  # test processes are forked
NEEDS_MORE = ("quantized", "cluster", "gpu", "network")
NO_TESTS = (4, 5)  # pytest's exit codes for a path that does not exist and for no test selected
SECONDS = 600
COPY = Path()  # of the repository, one for each worker process
Row = dict[str, Any]


@dataclass(frozen=True)
class Mutation:
    """A guarded line and how to break it."""

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


def read_lines() -> list[Mutation]:
    """All mutations of lines.yaml."""
    areas = yaml.safe_load(LINES.read_text()).items()
    return [
        Mutation(area, one["breaks"], one["line"], one["with"], tuple(one["tests"]))
        for area, listed in areas
        for one in listed
    ]


def main() -> None:
    """Try the mutations and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description=__doc__)
    parser.add_argument(
        "--only", default="", help="regular expression on the sentence, area or file of lines"
    )
    parser.add_argument(
        "--changed",
        metavar="REVISION",
        help="only lines of files that differ from this git revision",
    )
    parser.add_argument(
        "-j", type=int, default=1, help="how many to try at the same time (default 1)"
    )
    options = parser.parse_args()
    differ = {*git("diff", "--name-only", options.changed or "HEAD", "--", "cpt")}
    chosen = []
    for mutation in read_lines():
        files = {path for path, _ in mutation.matches()}
        is_named = re.search(options.only, "\n".join([mutation.breaks, mutation.area, *files]))
        if is_named and (
            options.changed is None or not files or files & differ
        ):  # no file: the pattern is stale
            chosen.append(mutation)
    # Compiled files are safe: a broken file has another modification time.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = False
    for library in IMPORTED_ONCE:
        import_module(library)
    scratch = Path(tempfile.mkdtemp(prefix="mutations-"))
    try:
        rows = try_all(chosen, options.j, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(any(row["status"] != "noticed" for row in rows.values()))


def try_all(chosen: list[Mutation], workers: int, scratch: Path) -> dict[str, Row]:
    """Try each in a copy below `scratch`; results are written after each one."""
    rows: dict[str, Row] = {}
    with ProcessPoolExecutor(workers, get_context("fork"), make_copy, (scratch,)) as pool:
        futures = {pool.submit(try_mutation, one): one for one in chosen}
        for future in as_completed(futures):
            problem = future.exception()
            row = (
                future.result()
                if problem is None
                else row_of(futures[future], "untested", repr(problem))
            )
            rows[row["breaks"]] = row
            write_results(rows, [])
            outcome = row["noticed_by"] or row["error"]
            print(
                f"{row['status']:8} {row['seconds']:5.1f} s  {row['breaks']}: {outcome}", flush=True
            )
        noticing = sorted({row["noticed_by"] for row in rows.values()} - {""})
        for test in pool.submit(failing_unbroken, noticing).result():
            for row in rows.values():
                if row["noticed_by"] == test:
                    row |= {"status": "survived", "noticed_by": "", "error": f"{test} fails anyway"}
        print(json.dumps(write_results(rows, pool.submit(names_of_promises).result())))
    return rows


def make_copy(scratch: Path) -> None:
    """Copy the repository for this worker."""
    global COPY
    COPY = scratch / str(os.getpid()) / "repository"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard"):
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)


def git(*words: str) -> list[str]:
    """The lines that a git command prints."""
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()


def row_of(mutation: Mutation, status: str, error: str = "") -> Row:
    """A row of the results."""
    about = {"breaks": mutation.breaks, "area": mutation.area, "file": ""}
    return about | {"status": status, "noticed_by": "", "error": error, "seconds": 0.0}


def try_mutation(mutation: Mutation) -> Row:
    """Break the line in this worker's copy, run the tests, and repair it."""
    matches, begin = mutation.matches(), time.monotonic()
    if len(matches) != 1:
        return row_of(mutation, "stale", f"the pattern matches {len(matches)} times")
    path, broken = matches[0]
    ast.parse(broken)  # a syntax error would be noticed by every test
    (COPY / path).write_text(broken)
    codes, failed, error = [], "", ""
    try:
        for tests in mutation.tests:
            code, failed, error = run_tests(tests)
            codes.append(code)
            if code == 1:
                break
    finally:
        shutil.copy2(ROOT / path, COPY / path)
    status = "noticed" if 1 in codes else "survived" if 0 in codes else "untested"
    seconds = round(time.monotonic() - begin, 1)
    return row_of(mutation, status, error) | {
        "file": path,
        "noticed_by": failed,
        "seconds": seconds,
    }


def run_tests(tests: str, *options: str, start: str = "fork") -> tuple[int, str, str]:
    """Pytest's exit code, the first test that failed and its error, or else what pytest printed; in a child process
    that imports the copy's cpt.

    Args:
        start: how promises start a command; `forkserver` where tests before it in this process may have used threads.
    """
    log = COPY.parent / "log"
    if (child := os.fork()) == 0:
        os.setsid()
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.chdir(COPY)
        sys.path[:] = [
            str(COPY),
            *(part for part in sys.path if Path(part or ".").resolve() != ROOT),
        ]
        os.environ |= {"PYTHONPATH": str(COPY), "CPT_PROMISES_START": start}
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "cpt")
        ]:
            del sys.modules[name]
        # slow tests run where they are named
        markers = (
            ["-m", " and ".join(f"not {mark}" for mark in NEEDS_MORE)]
            if "-k" in tests or "::" in tests
            else []
        )
        common = f"-x -q -rfE -p no:cacheprovider --timeout={SECONDS} --basetemp={COPY.parent}/tests".split()
        below = tuple(os.listdir("tests"))
        words = [f"tests/{word}" if word.startswith(below) else word for word in shlex.split(tests)]
        os._exit(int(pytest.main([*common, *markers, *options, *words])))
    code, said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text()
    for process in psutil.process_iter():  # what the tests left running
        with suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == child:
                process.kill()
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+(?:\[.*?\])?)(?: - .*)?$", said, re.MULTILINE)
    if code == 1 and failed is not None:
        error = re.search(r"^E\s+(.*)$", said, re.MULTILINE)
        return code, failed[1], error[1][:200] if error else "timeout"
    return (
        (code if code in (0, *NO_TESTS) else 2),
        "",
        "" if code in (0, *NO_TESTS) and not options else said,
    )


def failing_unbroken(tests: list[str]) -> list[str]:
    """Which of these tests fail where nothing is broken, and so prove nothing."""
    failing: list[str] = []
    while remaining := [test for test in tests if test not in failing]:
        code, failed, _ = run_tests(shlex.join(remaining), start="forkserver")
        if code != 1 or failed not in remaining:
            break
        failing.append(failed)
    return failing


def names_of_promises() -> list[str]:
    """All tests of tests/promises, without parameters."""
    said = run_tests("promises -k test", "--collect-only")[2]
    return sorted(set(re.findall(r"^tests/(promises/\w+\.py::\w+)", said, re.MULTILINE)))


def write_results(new: dict[str, Row], promised: list[str]) -> dict[str, int]:
    """Write the new rows and, for lines that were not tried now, the rows of earlier runs; returns the counts."""
    before = json.loads(RESULTS.read_text())["mutations"] if RESULTS.exists() else []
    rows, lines = {row["breaks"]: row for row in before} | new, read_lines()
    listed = [rows[one.breaks] for one in lines if one.breaks in rows]
    noticing = [(row["noticed_by"] or "").partition("[")[0] for row in listed]
    counts = {"lines": len(lines), **Counter(row["status"] for row in listed)}
    counts["noticed by a promise"] = sum(name.startswith("promises/") for name in noticing)
    measured = {"measured": counts.get("noticed", 0), "met": counts.get("noticed") == len(lines)}
    content = {
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "measurements": [
            {
                "name": "broken lines that a test notices",
                "target": f"{len(lines)}",
                "unit": "lines",
                **measured,
            }
        ],
        "counts": counts,
        "not noticed": [row["breaks"] for row in listed if row["status"] != "noticed"],
        "promises that noticed nothing": [name for name in promised if name not in noticing],
        "mutations": listed,
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    return counts


if __name__ == "__main__":
    main()
