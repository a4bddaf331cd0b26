"""`python -m benchmarks.mutations`: break each of the guarded lines alone, and run the tests that must notice: minutes
on a core.

It works on a copy of the repository. The test that noticed runs once more with nothing broken, for one that fails
anyway proves nothing. Ends with exit code 1 where a broken line went unnoticed. Writes
benchmarks/results/mutations.json.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.mutations.lines import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
LEFT_AT_HOME = (
    ".git",
    ".venv*",
    "__pycache__",
    ".*_cache",
    "runs",
    "demo_runs",
    "*.egg-info",
    "results",
    "dist",
    "build",
)
IMPORTED_ONCE = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "trl",
)  # none of ours: that is what is broken
SECONDS = 300


def main() -> None:
    """Break, run, tell, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description=__doc__)
    parser.add_argument(
        "--only", default="", help="those whose file or subject contains this; of the others the results stay"
    )
    asked = parser.parse_args()
    chosen = [one for one in MUTATIONS if asked.only in f"{one.about} {one.file}"]
    sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
    for library in IMPORTED_ONCE:
        import_module(library)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*LEFT_AT_HOME))
        rows = [tried(copy, mutation) for mutation in chosen]
    write_results(rows)
    noticed = sum(bool(row["noticed_by"]) for row in rows)
    print(f"{noticed} of {len(rows)} broken lines were noticed.")
    sys.exit(noticed < len(rows))


def tried(copy: Path, mutation: Mutation) -> dict[str, str | None]:
    """One line broken, and the first test that noticed."""
    path = copy / mutation.file
    sound = path.read_text()
    path.write_text(broken(sound, mutation))
    begun = time.monotonic()
    noticed_by = run_tests(copy, [mutation.tests])
    path.write_text(sound)
    if noticed_by and run_tests(copy, [noticed_by]):
        print(f"{noticed_by} fails with nothing broken, too")
        noticed_by = None
    print(
        f"{mutation.about}: {mutation.file}: {noticed_by or 'NOT NOTICED'} ({time.monotonic() - begun:.0f} s)",
        flush=True,
    )
    return {
        "about": mutation.about,
        "file": mutation.file,
        "line": mutation.line,
        "broken": mutation.broken,
        "noticed_by": noticed_by,
    }


def write_results(rows: Sequence[dict[str, str | None]]) -> None:
    """These, beside what an earlier run found of the lines that were not tried now; lines that are no longer in the
    list go."""
    before = json.loads(RESULTS.read_text())["mutations"] if RESULTS.exists() else []
    found = {(row["file"], row["line"], row["broken"]): row for row in [*before, *rows]}
    listed = [key for one in MUTATIONS if (key := (one.file, one.line, one.broken)) in found]
    content = {"python": sys.version.split()[0], "mutations": [found[key] for key in listed]}
    RESULTS.write_text(json.dumps(content, indent=1) + "\n")


def broken(text: str, mutation: Mutation) -> str:
    """The file with that line broken.

    Raises:
        ValueError: the line is not there, or more than once: the list is out of date.
    """
    if text.count(mutation.line) != 1:
        raise ValueError(f"{mutation.file} has {text.count(mutation.line)} times: {mutation.line}")
    return text.replace(mutation.line, mutation.broken)


def run_tests(copy: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails, None where all pass; in a child of this process, so that torch is imported once.

    Raises:
        RuntimeError: the tests could not be run at all.
    """
    log = copy.parent / "log"
    if (child := os.fork()) == 0:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        os.chdir(copy)
        sys.path[:] = [str(copy), *(part for part in sys.path if Path(part or ".").resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "cpt")]:
            del sys.modules[name]
        options = [
            "-x",
            "-q",
            "-rfE",
            "-p",
            "no:cacheprovider",
            "--no-header",
            f"--timeout={SECONDS}",
            f"--basetemp={copy.parent / 'tests'}",
        ]
        os._exit(int(pytest.main([*options, *tests])))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = log.read_text()
    if code == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if code != 1 or failed is None:
        raise RuntimeError(f"pytest ended with {code}:\n{said[-3000:]}")
    return failed[1]


if __name__ == "__main__":
    main()
