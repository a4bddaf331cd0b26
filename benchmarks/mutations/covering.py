"""Which tests run a line of cpt/, in the processes that they start too: recorded once, for mutations.

This module is a plugin of pytest and of coverage while `record` runs: coverage's context is the test that runs, or the
fixture that several tests share. `Covering` reads the record and follows lines that have moved since.
"""

import ast
import difflib
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    "data",
    "training",
    "checkpoints",
    "optim",
    "stages",
    "evaluation",
    "export",
    "models",
    "planning",
)
KEPT = ROOT / "build/mutations"
NEEDS_MORE = ("quantized", "cluster", "gpu", "network")
# `first`: a mutant meets those of its room and the promises among them before the others; then the rest
FIRST = (*(f"tests/{room}" for room in ROOMS), "tests/promises")
RUNS = {
    "first": ("not slow and not long", FIRST),
    "default": ("not slow and not long", tuple(f"--ignore={folder}" for folder in FIRST)),
    "slow": ("slow", ()),
}
# `source` and not `source_pkgs`: a test runs reload.py as a script, whose module has another name
SETTINGS = """[run]
source = {root}/cpt
data_file = {folder}/data
parallel = true
concurrency = multiprocessing,thread
patch = subprocess,_exit,fork
plugins = benchmarks.mutations.covering
disable_warnings = no-data-collected,module-not-measured,module-not-imported,dynamic-conflict
"""
CONTEXT_FILE = (
    "CPT_COVERING_CONTEXT"  # names a file that holds the context of processes that a test starts
)


def coverage_init(registry: Any, options: Any) -> None:
    """Called by coverage in each process: what a test has started belongs to this test."""
    registry.add_configurer(_Context())


class _Context(coverage.CoveragePlugin):
    def configure(self, config: Any) -> None:
        path = Path(os.environ.get(CONTEXT_FILE, "none"))
        if path.is_file():
            config.set_option("run:context", path.read_text())


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput") and config.getoption("numprocesses", None):
        return  # xdist's controller runs no test
    os.environ[CONTEXT_FILE] = str(_folder() / f"context-{os.getpid()}")
    config.pluginmanager.register(_Recorder(), "covering")


def _folder() -> Path:
    return Path(os.environ["CPT_COVERING"])


class _Recorder:
    """Names contexts, and keeps the seconds and the fixtures of each test."""

    def __init__(self) -> None:
        self.names = [""]
        self.tests: dict[str, dict[str, Any]] = {}

    def enter(self, name: str) -> None:
        self.names.append(name.replace("|", "/"))  # coverage joins contexts with |
        self.switch()

    def leave(self) -> None:
        self.names.pop()
        self.switch()

    def switch(self) -> None:
        name = self.names[-1]
        Path(os.environ[CONTEXT_FILE]).write_text(name)
        running = coverage.Coverage.current()
        if running is not None:
            running.switch_context(name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        definitions = item._fixtureinfo.name2fixturedefs.values()
        fixtures = {_name_of(one) for several in definitions for one in several}
        begin = time.monotonic()
        self.enter(item.nodeid)
        result = yield
        self.leave()
        seconds = round(time.monotonic() - begin, 2)
        self.tests[item.nodeid] = {"seconds": seconds, "fixtures": sorted(fixtures - {""})}
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        name = _name_of(fixturedef)
        if name:
            self.enter(name)
        try:
            return (yield)
        finally:
            if name:
                self.leave()

    def pytest_sessionfinish(self) -> None:
        (_folder() / f"tests-{os.getpid()}.json").write_text(json.dumps(self.tests))


def _name_of(fixture: Any) -> str:
    """Empty where each test has its own."""
    return "" if fixture.scope == "function" else f"fixture {fixture.baseid}::{fixture.argname}"


def record(run: str, workers: int) -> Path:
    """Run the tests of a run and keep which lines each runs, unless a file of an earlier commit does; returns it."""
    kept = KEPT / f"{run}.json"
    if kept.exists():
        return kept
    commit = _git("rev-parse", "HEAD").strip()
    folder = KEPT / f"recording-{run}"
    subprocess.run(["rm", "-rf", folder], check=True)
    folder.mkdir(parents=True)
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(root=ROOT, folder=folder))
    markers, paths = RUNS[run]
    markers = " and ".join([markers, *(f"not {name}" for name in NEEDS_MORE)])
    words = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q"]
    words += ["-p", "benchmarks.mutations.covering", "-n", str(workers), "--dist", "worksteal"]
    # torch compiles nothing while lines are counted
    words += ["-m", markers, "-k", "not compiled_once", *paths]
    environment = os.environ | {"CPT_COVERING": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run(words, cwd=ROOT, env=environment, check=False)
    subprocess.run(
        [sys.executable, "-m", "coverage", "combine", "--quiet", f"--rcfile={settings}"],
        cwd=ROOT,
        check=True,
    )
    kept.write_text(json.dumps({"commit": commit} | _read(folder)))
    subprocess.run(["rm", "-rf", folder], check=True)
    return kept


def _read(folder: Path) -> dict[str, Any]:
    tests: dict[str, dict[str, Any]] = {}
    for path in folder.glob("tests-*.json"):
        tests |= json.loads(path.read_text())
    users = defaultdict(set)
    numbers = {test: number for number, test in enumerate(tests)}
    for test, known in tests.items():
        users[test.replace("|", "/")].add(numbers[test])
        for fixture in known["fixtures"]:
            users[fixture].add(numbers[test])
    data = coverage.CoverageData(str(folder / "data"))
    data.read()
    lines: dict[str, dict[int, list[int]]] = {}
    for path in sorted(data.measured_files()):
        if not path.startswith(f"{ROOT}/cpt/"):
            continue
        running = {}
        for line, contexts in data.contexts_by_lineno(path).items():
            parts = {part for context in contexts for part in context.split("|")}
            running[line] = sorted({number for part in parts for number in users[part]})
        lines[str(Path(path).relative_to(ROOT))] = running
    seconds = {test: known["seconds"] for test, known in tests.items()}
    return {"tests": seconds, "lines": lines}


class Covering:
    """The tests that run lines of cpt/, of one record; lines and tests may have changed since."""

    def __init__(self, kept: Path) -> None:
        content = json.loads(kept.read_text())
        self.commit = content["commit"]
        self.seconds: dict[str, float] = content["tests"]
        self.names = list(self.seconds)
        self.lines = content["lines"]
        changed = _git("diff", "--name-only", self.commit, "--", "tests").splitlines()
        changed += _git("ls-files", "--others", "--exclude-standard", "--", "tests").splitlines()
        self.changed = {name for name in changed if Path(name).name.startswith("test_")}

    def tests(self, path: str, first: int, last: int) -> dict[str, float]:
        """Tests that run one of these lines, with seconds: the quickest first, whole files that have changed last.

        Where the lines are outside of functions, and run by an import, these are all tests that run the file's
        functions.
        """
        running = self.lines.get(path, {})
        inside = _lines_of_functions((ROOT / path).read_text())
        if first in inside:
            statements = _whole_statements((ROOT / path).read_text(), first, last)
            lines = {str(line) for line in self._lines_then(path, *statements)}
        else:
            then = _lines_of_functions(self._text_then(path))
            lines = {line for line in running if int(line) in then}
        numbers = {number for line in lines for number in running.get(line, ())}
        tests = {self.names[number] for number in numbers}
        unchanged = {
            test: self.seconds[test]
            for test in tests
            if test.partition("::")[0] not in self.changed
        }
        files = {name: 60.0 for name in sorted(self.changed) if (ROOT / name).exists()}
        return dict(sorted(unchanged.items(), key=lambda pair: pair[1])) | files

    def _text_then(self, path: str) -> str:
        return _git("show", f"{self.commit}:{path}")

    def _lines_then(self, path: str, first: int, last: int) -> set[int]:
        """The lines of the record's commit that became these, and the one before where they are new."""
        now = (ROOT / path).read_text().splitlines()
        then = self._text_then(path).splitlines()
        lines = set()
        matcher = difflib.SequenceMatcher(None, then, now, autojunk=False)
        for tag, then_begin, then_end, now_begin, now_end in matcher.get_opcodes():
            for index in range(max(first - 1, now_begin), min(last, now_end)):
                if tag == "equal":
                    lines.add(then_begin + index - now_begin + 1)
                else:
                    lines |= {then_begin, *range(then_begin + 1, then_end + 1)}
        return lines


def _lines_of_functions(text: str) -> set[int]:
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    return {
        line
        for node in functions
        for line in range(node.body[0].lineno, (node.end_lineno or 0) + 1)
    }


def _whole_statements(text: str, first: int, last: int) -> tuple[int, int]:
    """First and last line of the statements that these lines belong to; of `if` and the like, their heads."""
    begin, end = first, last
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt):
            continue
        body = getattr(node, "body", None)
        node_end = body[0].lineno - 1 if body else node.end_lineno or node.lineno
        if node.lineno <= last and first <= node_end:
            begin, end = min(begin, node.lineno), max(end, node_end)
    return begin, end


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    print(record(sys.argv[1], int(sys.argv[2])))
