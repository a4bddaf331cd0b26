"""Break guarded lines of cpt/ one at a time and check that a test notices: `python -m benchmarks.mutations`.

lines.yaml lists the lines by what breaks: a regular expression that matches once in all of cpt/, its replacement, and
the tests that should notice, promises first. The command works on copies of the repository and writes
benchmarks/results/mutations.json. It ends with exit code 1 unless every broken line was noticed.
"""

import argparse
import ast
import json
import os
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
NOT_COPIED = (".git", ".venv*", ".*_cache", "runs", "demo_runs", "*.egg-info", "results", "dist", "build")
IMPORTED_ONCE = ("torch", "transformers", "accelerate", "datasets", "peft", "trl")  # children are forked with these
NEVER = ("browser", "quantized", "llama_cpp", "cluster", "gpu", "network")
NAMED = ["-m", " and ".join(f"not {mark}" for mark in NEVER)]  # tests named by -k or :: run even if they are slow
NO_TESTS = (4, 5)  # pytest's exit codes for paths that do not exist and for no test selected
SECONDS = 240
COPY = Path()  # of the repository, one for each worker process


@dataclass(frozen=True)
class Mutation:
    """A guarded line and how to break it."""

    area: str
    breaks: str
    """What goes wrong, in one sentence."""
    pattern: str
    """Any white space in it matches any white space, line breaks included, or none."""
    replacement: str
    tests: tuple[str, ...]
    """Arguments of pytest, relative to tests/; the next is run where the one before notices nothing."""

    def find(self, root: Path) -> list[tuple[Path, str]]:
        """Each file with a match, once for each match, with its text after the replacement."""
        regex = re.compile(re.sub(r"[ \n]+", r"\\s*", self.pattern.strip()))
        found = []
        for path, text in sources(root).items():
            number = len(regex.findall(text))
            found += [(path, regex.sub(self.replacement, text))] * number if number else []
        return found


@cache
def sources(root: Path) -> dict[Path, str]:
    """All files of cpt/ with their text."""
    return {path.relative_to(root): path.read_text() for path in sorted((root / "cpt").rglob("*.py"))}


def read_lines(file: Path = LINES) -> list[Mutation]:
    """All mutations of the file."""
    areas: dict[str, list[dict[str, Any]]] = yaml.safe_load(file.read_text())
    return [
        Mutation(area, one["breaks"], one["line"], one["with"], tuple(one["tests"]))
        for area, listed in areas.items()
        for one in listed
    ]


def main() -> None:
    """Try the mutations and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="regular expression: try lines whose description or file matches")
    parser.add_argument("--changed", metavar="REVISION", help="try lines of files that differ from this git revision")
    parser.add_argument("-j", type=int, default=1, help="how many to try at the same time (default 1)")
    options = parser.parse_args()
    mutations = read_lines()
    chosen = [one for one in mutations if is_chosen(one, options.only, options.changed)]
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = False  # a broken file has another time than the compiled one
    for library in IMPORTED_ONCE:
        import_module(library)
    results: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(max(1, options.j), mp_context=get_context("fork"), initializer=make_copy) as pool:
        for future in as_completed(pool.submit(try_mutation, one) for one in chosen):
            row = future.result()
            results[row["breaks"]] = row
            write_results(mutations, results, [])
            print(f"{row['status']:8} {row['seconds']:5.1f} s  {row['breaks']}: {row['noticed_by'] or ''}", flush=True)
        noticing = {row["noticed_by"] for row in results.values() if row["noticed_by"]}
        unsound = pool.submit(failing_unbroken, sorted(noticing)).result()
        written = write_results(mutations, mark_unsound(results, unsound), pool.submit(promises).result())
    print(json.dumps(written["counts"]))
    sys.exit(any(row["status"] != "noticed" for row in results.values()))


def is_chosen(mutation: Mutation, only: str, revision: str | None) -> bool:
    """Whether --only and --changed select it; a stale pattern counts as changed."""
    files = {str(path) for path, _ in mutation.find(ROOT)}
    if revision is not None and files and not files & changed_files(revision):
        return False
    return re.search(only, "\n".join([mutation.breaks, mutation.area, *files])) is not None


@cache
def changed_files(revision: str) -> set[str]:
    """Paths below cpt/ that differ from the revision."""
    command = ["git", "diff", "--name-only", revision, "--", "cpt"]
    return set(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines())


def make_copy() -> None:
    """Copy the repository for this worker; removed with it."""
    global COPY
    scratch = tempfile.TemporaryDirectory(prefix="mutations-")
    make_copy.scratch = scratch  # type: ignore[attr-defined]  # lives as long as the process
    COPY = Path(scratch.name) / "repository"
    shutil.copytree(ROOT, COPY, ignore=shutil.ignore_patterns(*NOT_COPIED))


def try_mutation(mutation: Mutation) -> dict[str, Any]:
    """Break the line in this worker's copy, run the tests, and repair it."""
    found, begin = mutation.find(ROOT), time.monotonic()
    row: dict[str, Any] = {"breaks": mutation.breaks, "area": mutation.area, "file": None, "status": "stale"}
    row |= {"noticed_by": None, "error": None, "seconds": 0.0}
    if len(found) != 1:
        return row | {"error": f"the pattern matches {len(found)} times"}
    (path, broken), row["file"] = found[0], str(found[0][0])
    ast.parse(broken)
    if broken == sources(ROOT)[path]:
        return row | {"error": "the replacement changes nothing"}
    (COPY / path).write_text(broken)
    outcomes = []
    try:
        for tests in mutation.tests:
            outcomes.append(run_tests(tests))
            if outcomes[-1][0] == 1:
                break
    finally:
        shutil.copy2(ROOT / path, COPY / path)
    code, test, error = outcomes[-1]
    status = "noticed" if code == 1 else "survived" if any(code == 0 for code, _, _ in outcomes) else "untested"
    return row | {
        "status": status,
        "noticed_by": test if status == "noticed" else None,
        "error": error,
        "seconds": round(time.monotonic() - begin, 1),
    }


def failing_unbroken(tests: list[str]) -> set[str]:
    """Which of these tests fail where nothing is broken, and so prove nothing."""
    failing: set[str] = set()
    while remaining := [test for test in tests if test not in failing]:
        code, test, _ = run_tests(shlex.join(remaining))
        if code != 1 or test in failing:
            break
        failing.add(test)
    return failing


def mark_unsound(results: dict[str, dict[str, Any]], unsound: set[str]) -> dict[str, dict[str, Any]]:
    """Count a line as survived where only a test that fails anyway noticed it."""
    for row in results.values():
        if row["noticed_by"] in unsound:
            row |= {"status": "survived", "error": f"{row['noticed_by']} fails anyway", "noticed_by": None}
    return results


def run_tests(tests: str, *options: str) -> tuple[int, str, str]:
    """Pytest's exit code, the first test that failed and its error, from a child process with the copy's own cpt."""
    log = COPY.parent / "log"
    if (child := os.fork()) == 0:
        os.setsid()
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.chdir(COPY)
        sys.path[:] = [str(COPY), *(part for part in sys.path if Path(part or ".").resolve() != ROOT)]
        os.environ |= {"PYTHONPATH": str(COPY), "CPT_PROMISES_START": "fork"}
        for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "cpt")]:
            del sys.modules[name]
        named = NAMED if "-k" in tests or "::" in tests else []
        common = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", f"--timeout={SECONDS}", *named]
        words = [
            f"tests/{word}" if word.startswith(tuple(os.listdir("tests"))) else word for word in shlex.split(tests)
        ]
        os._exit(int(pytest.main([*common, f"--basetemp={COPY.parent / 'tests'}", *options, *words])))
    code, said = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), log.read_text()
    end_session(child)
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+(?:\[.*?\])?)(?: - .*)?$", said, re.MULTILINE)
    if code not in (0, 1, *NO_TESTS) or code == 1 and failed is None:
        raise RuntimeError(f"pytest {tests} ended with {code}:\n{said[-3000:]}")
    if code != 1:
        return code, said if options else "", ""
    assert failed is not None
    error = re.search(r"^E\s+(.*)$", said, re.MULTILINE)
    return code, failed[1], error[1][:200] if error else "timeout"


def end_session(leader: int) -> None:
    """Kill what the tests left running."""
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == leader:
                process.kill()


def promises() -> list[str]:
    """Names of all tests in tests/promises, without parameters."""
    said = run_tests("promises", "--collect-only", *NAMED)[1]
    return sorted(set(re.findall(r"^tests/(promises/\w+\.py::\w+)", said, re.MULTILINE)))


def write_results(mutations: list[Mutation], new: dict[str, dict[str, Any]], promised: list[str]) -> dict[str, Any]:
    """Write the new rows and, for lines that were not tried now, the rows of earlier runs."""
    before = json.loads(RESULTS.read_text())["mutations"] if RESULTS.exists() else []
    rows = {row["breaks"]: row for row in before if "breaks" in row} | new
    listed = [rows[one.breaks] for one in mutations if one.breaks in rows]
    noticing = {(row["noticed_by"] or "").partition("[")[0] for row in listed}
    counts = {"mutations": len(mutations), **Counter(row["status"] for row in listed)}
    counts["noticed by a promise"] = sum((row["noticed_by"] or "").startswith("promises/") for row in listed)
    content = {
        "python": sys.version.split()[0],
        "counts": counts,
        "survivors": [row["breaks"] for row in listed if row["status"] != "noticed"],
        "promises that noticed nothing": [name for name in promised if name not in noticing],
        "mutations": listed,
    }
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")
    return content


if __name__ == "__main__":
    main()
