"""How fast is a step on a GPU? `python -m benchmarks.gpu --cases A B C`, then `--cases D E F`: 9 minutes each on one H100 or H200.

Each case by each system in a process of its own, one after the other, so that what else the machine does meets all of them. Each result is
appended to benchmarks/results/gpu.jsonl as it comes; what stands there of the same device and versions is not run again, so a command that
was cut off can be repeated. `--dry-run` goes through all cases and systems on a CPU, with tiny shapes, and keeps nothing.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, SYSTEMS, Case, tiny
from benchmarks.gpu.corpus import prepare
from benchmarks.gpu.gates import gates_of, told
from benchmarks.gpu.initial import write_initial
from benchmarks.gpu.processes import ROOT, SHORTEST, Result, Started, begin, environment_of_a_run, run_apart
from benchmarks.gpu.run import machine, run_one
from cpt.hardware import find_gpus

RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
Runs = Sequence[tuple[Case, str]]


def main() -> None:
    """Run what is asked for, and say which gates are reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["A", "B", "C"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--minutes", type=float, default=9.0, help="nothing runs longer than these")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one run")
    parser.add_argument("--gib", type=float, help="hold each process to so much of the GPU's memory")
    parser.add_argument("--anew", action="store_true", help="also what has a result")
    parser.add_argument("--write", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    began = time.monotonic()
    wanted = [(CASES[name], system) for name in asked.cases for system in asked.systems if system in CASES[name].systems]
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["CPT_CACHE"] = str(Path(temporary) / "cache")  # of this benchmark alone
        if asked.dry_run:
            dry_run(wanted, Path(temporary))
            return
        if not find_gpus():
            raise SystemExit("This needs an NVIDIA GPU. To see that it would start: --dry-run")
        there = [] if asked.anew else read(asked.write)
        missing = [(case, system) for case, system in wanted if not has_result(there, case.name, system, asked.gib)]
        if missing:
            prepare_all(missing, Path(temporary))
            run_all(missing, Path(temporary), end=began + 60 * asked.minutes, limit=asked.limit, gib=asked.gib, write=asked.write)
    print(told(gates_of(read(asked.write))))


def prepare_all(runs: Runs, folder: Path) -> None:
    """Rows and weights, before anything is timed; weights in a process that gives the GPU back."""
    cases = {case.name: case for case, _ in runs}
    for case in cases.values():
        prepare(case, folder / case.name)
    words = [sys.executable, "-m", "benchmarks.gpu.initial", str(folder), *cases]
    subprocess.run(words, cwd=ROOT, env=environment_of_a_run(), check=True)


def run_all(runs: Runs, folder: Path, *, end: float, limit: float, gib: float | None, write: Path) -> None:
    """One after the other, until the time is over."""
    waiting: Started | None = None
    for number, (case, system) in enumerate(runs):
        left = end - time.monotonic()
        if left < SHORTEST:
            print(f"{case.name} by {system}: left for another time", flush=True)
            continue
        started = waiting or begin(case, system, folder / case.name, gib=gib)
        waiting = None
        if number + 1 < len(runs):
            following, by = runs[number + 1]
            waiting = begin(following, by, folder / following.name, gib=gib)
        keep(run_apart(started, case, system, min(limit, left), gib), write)
    if waiting is not None:
        waiting.stop()


def keep(result: Result, path: Path) -> None:
    """One line more, on the disk at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")
    what = result.get("failed") or f"{result['tokens_per_second']:,.0f} tokens/s"
    print(f"{result['case']} by {result['system']}: {what}", flush=True)


def read(path: Path) -> list[Result]:
    """All results, the newest of each kind last."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_result(there: list[Result], case: str, system: str, gib: float | None) -> bool:
    """Of this device and these versions; a failure is none."""
    here = machine()
    same = [one for one in there if (one["case"], one["system"], one["gib"]) == (case, system, gib or CASES[case].gib)]
    return any("failed" not in one and all(one[name] == here[name] for name in ("device", "libraries")) for one in same)


def dry_run(runs: Runs, folder: Path) -> None:
    """In children of this process, which has everything imported."""
    cases = {case.name: tiny(case) for case, _ in runs}
    for case in cases.values():
        prepare(case, folder / case.name)
    in_a_child(write_initial, list(cases.values()), folder)
    results = []
    for case, system in runs:
        out = folder / f"{case.name}-{system}.json"
        in_a_child(run_one, case.name, system, folder / case.name, out, is_dry=True, parts=2 if case.name == "B" else 1)
        results.append(json.loads(out.read_text()))
        losses = results[-1]["losses"]
        print(f"{case.name} by {system}: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    print(told([one for one in gates_of(results) if "losses" in one.name and one.reached is not None]))  # nothing else means anything here


def in_a_child(function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """What a process does and leaves behind is its own."""
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments, kwargs=options)
    child.start()
    child.join(timeout=120)
    if child.exitcode != 0:
        raise SystemExit(f"{function.__name__}{arguments}: exit code {child.exitcode}")


if __name__ == "__main__":
    main()
