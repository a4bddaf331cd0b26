"""Run tests on a copy of the repository in which something is broken; test processes are forked, all imports done."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

ROOT = Path(__file__).parents[2]
IMPORTED_ONCE = ("torch", "transformers", "accelerate", "datasets", "peft", "trl")
COPY = Path()  # of the repository, one for each worker process
Item = TypeVar("Item")


@dataclass(frozen=True)
class Outcome:
    """What pytest ended with."""

    code: int
    failed: str = ""
    """The first test that failed, relative to tests/."""
    error: str = ""
    """Its error, or what pytest printed where it could not run."""


@contextmanager
def workers(count: int, scratch: Path) -> Iterator[ProcessPoolExecutor]:
    """Processes that have imported what tests import, each with its copy of the repository."""
    # Compiled files are safe: a broken file has another modification time.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    sys.dont_write_bytecode = False
    for library in IMPORTED_ONCE:
        import_module(library)
    scratch.mkdir(parents=True, exist_ok=True)
    try:
        with ProcessPoolExecutor(count, get_context("fork"), _copy_repository, (scratch,)) as pool:
            yield pool
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def each(
    pool: ProcessPoolExecutor, attempt: Callable[[Item], Any], items: Iterable[Item]
) -> Iterator[tuple[Item, Any]]:
    """Each item with its result, or with the exception that it raised, in the order in which they end."""
    futures = {pool.submit(attempt, item): item for item in items}
    for future in as_completed(futures):
        yield futures[future], future.exception() or future.result()


def _copy_repository(scratch: Path) -> None:
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


@contextmanager
def broken(path: str, text: str) -> Iterator[None]:
    """This worker's copy with another text of one file."""
    original = (COPY / path).read_text()
    (COPY / path).write_text(text)
    try:
        yield
    finally:
        (COPY / path).write_text(original)


def run_tests(
    words: list[str],
    *,
    test_seconds: float = 600,
    all_seconds: float = 3600,
    start: str = "fork",
) -> Outcome:
    """Run pytest in a child process that imports the copy's cpt.

    Args:
        words: arguments of pytest; tests are relative to tests/.
        test_seconds: after which a test has failed.
        all_seconds: after which the first test has failed, whichever runs: it hangs where Python cannot interrupt it.
        start: how promises start a command; `forkserver` where tests before it in this process may have used threads.
    """
    log = COPY.parent / "log"
    if (child := os.fork()) == 0:
        _become_pytest(words, log, test_seconds, start)
    deadline = time.monotonic() + all_seconds
    ended, status = os.waitpid(child, os.WNOHANG)
    while ended == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    for process in psutil.process_iter():  # what the tests left running, or pytest itself
        with suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == child:
                process.kill()
    if ended == 0:
        os.waitpid(child, 0)
        return Outcome(1, words[0], "timeout")
    code, said = os.waitstatus_to_exitcode(status), log.read_text()
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+(?:\[.*?\])?)(?: - .*)?$", said, re.MULTILINE)
    if code == 1 and failed is not None:
        error = re.search(r"^E\s+(.*)$", said, re.MULTILINE)
        return Outcome(code, failed[1], error[1][:200] if error else "timeout")
    if code == 0 or code == pytest.ExitCode.NO_TESTS_COLLECTED:
        return Outcome(code)
    if code < 0 or "errors during collection" in said:  # pytest itself died, or could not import
        return Outcome(1, words[0], f"pytest ended with {code}")
    return Outcome(2, "", said)


def _become_pytest(words: list[str], log: Path, test_seconds: float, start: str) -> None:
    os.setsid()
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    os.chdir(COPY)
    elsewhere = [part for part in sys.path if Path(part or ".").resolve() != ROOT]
    sys.path[:] = [str(COPY), *elsewhere]
    paths = [str(COPY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    paths = [path for path in paths if path and Path(path).resolve() != ROOT]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "CPT_PROMISES_START": start}
    for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "cpt")]:
        del sys.modules[name]
    common = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", f"--timeout={test_seconds:.0f}"]
    below = tuple(os.listdir("tests"))
    words = [f"tests/{word}" if word.startswith(below) else word for word in words]
    os._exit(int(pytest.main([*common, f"--basetemp={COPY.parent}/tests", *words])))


def failing_unbroken(tests: list[str]) -> list[str]:
    """Which of these tests fail where nothing is broken, and so prove nothing."""
    failing: list[str] = []
    while remaining := [test for test in tests if test not in failing]:
        outcome = run_tests(["-m", "slow or not slow", *remaining], start="forkserver")
        if outcome.code != 1 or outcome.failed not in remaining:
            break
        failing.append(outcome.failed)
    return failing
