"""How fast is a training step on a GPU? `python -m benchmarks.gpu --cases A B C` runs each case by each system, for 9 minutes at most.

Each run has a process of its own, one after the other. Its result is appended to benchmarks/results/gpu.jsonl at once. What is there for
the same device and versions does not run again, so a command that was cut off can be repeated. `--dry-run` goes through all cases and
systems on a CPU, with tiny shapes, and writes no results. For rented machines see `python -m benchmarks.gpu.session`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, SYSTEMS, Case, tiny
from benchmarks.gpu.corpus import prepare
from benchmarks.gpu.gates import format_gates, gates_of
from benchmarks.gpu.page import RESULTS, read_lines
from benchmarks.gpu.processes import ROOT, SHORTEST, Job, Result, Started, begin, environment_of_a_run, run_job
from benchmarks.gpu.run import machine
from cpt.hardware import find_gpus

AT_EQUAL_ROWS = ("cpt", "liger", "trainer")  # whose memory is compared


def main() -> None:
    """Run the missing jobs and print the gates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["A", "B", "C"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole command")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one run")
    parser.add_argument("--gib", type=float, help="GPU memory that each process may use")
    parser.add_argument("--rerun", action="store_true", help="also what has a result")
    parser.add_argument("--write", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    if not options.dry_run and not find_gpus():
        raise SystemExit("This benchmark needs an NVIDIA GPU. To try it on a CPU: --dry-run")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write = folder / "gpu.jsonl" if options.dry_run else options.write
        jobs = jobs_of(options.cases, options.systems, gib=options.gib, is_dry=options.dry_run)
        known = [] if options.rerun else read(write)
        run_jobs([job for job in jobs if not has_result(known, job)], folder, end=end, limit=options.limit, write=write)
        print(format_gates(gates_of(read(write))))


def jobs_of(cases: Iterable[str], systems: Sequence[str], *, gib: float | None = None, is_dry: bool = False) -> list[Job]:
    """Each case by each system where it is fastest, then some of them with equal micro-batches."""
    best = [Job(case, system, None, gib, is_dry) for case in cases for system in systems if system in CASES[case].systems]
    return best + [
        Job(job.case, job.system, CASES[job.case].equal_parts, gib, is_dry)
        for job in best
        if CASES[job.case].equal_parts > 1 and job.system in AT_EQUAL_ROWS
    ]


def run_jobs(jobs: Sequence[Job], folder: Path, *, end: float, limit: float, write: Path) -> None:
    """Run one after the other, until the time is over. What has a result by then is skipped."""
    if not jobs:
        return
    prepare_all(jobs, folder, end - time.monotonic())
    waiting = iter(jobs)
    following = begin_next(waiting, folder, write)
    while following is not None:
        job, started = following
        left = end - time.monotonic()
        if left < SHORTEST:
            started.stop()
            print(f"no time left for: {', '.join(str(one) for one in (job, *waiting))}", flush=True)
            return
        following = begin_next(waiting, folder, write)
        keep(run_job(started, job, min(limit, left)), write)


def begin_next(waiting: Iterator[Job], folder: Path, write: Path) -> tuple[Job, Started] | None:
    """Start the process of the next job without a result; it imports what it needs, and waits."""
    job = next((job for job in waiting if not has_result(read(write), job)), None)
    return None if job is None else (job, begin(job, folder / job.case))


def prepare_all(jobs: Sequence[Job], folder: Path, seconds: float) -> None:
    """Write rows and weights before anything is timed; weights in a process that gives the GPU's memory back."""
    os.environ["CPT_CACHE"] = str(folder / "cache")  # used by this benchmark alone
    cases = {job.case: as_run(CASES[job.case], job) for job in jobs if not (folder / job.case / "corpus.hash").exists()}
    for name, case in cases.items():
        prepare(case, folder / name)
    if cases:
        words = [sys.executable, "-m", "benchmarks.gpu.initial", str(folder), *cases, *(["--dry-run"] if jobs[0].is_dry else [])]
        subprocess.run(words, cwd=ROOT, env=environment_of_a_run(), check=True, timeout=max(1.0, seconds))


def as_run(case: Case, job: Job) -> Case:
    """The case as the job runs it."""
    return tiny(case) if job.is_dry else case


def keep(result: Result, path: Path) -> None:
    """Append a result to the file, and print it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")
    what = result.get("failed") or f"{result['tokens_per_second']:,.0f} tokens/s, {result['parts']} micro-batches a step"
    print(f"{result['case']} by {result['system']}: {what}", flush=True)


def read(path: Path) -> list[Result]:
    """Results of runs, in the order in which they came."""
    return [line for line in read_lines(path) if "system" in line]


def has_result(known: list[Result], job: Job) -> bool:
    """Whether the job succeeded on this device with these versions."""
    wanted = {"case": job.case, "system": job.system, "gib": job.gib or CASES[job.case].gib, "dry_run": job.is_dry, **here()}
    same = [one for one in known if "failed" not in one and all(one.get(name) == value for name, value in wanted.items())]
    return any(one["best"] if job.parts is None else one["parts"] == job.parts for one in same)


@cache
def here() -> dict[str, Any]:
    """The device and the versions of this machine."""
    return {name: value for name, value in machine().items() if name in ("device", "libraries")}


if __name__ == "__main__":
    main()
