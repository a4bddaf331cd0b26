"""Each run in a process of its own. The next process imports what it needs while the present one trains, and waits for
its turn."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, Case, tiny
from benchmarks.gpu.corpus import prepare
from benchmarks.gpu.run import OUT_OF_MEMORY, machine
from cpt.hardware import find_gpus

ROOT = Path(__file__).parents[2]
CACHE = Path(
    "/tmp/cpt-gpu-cache"
)  # the same path on every machine, so that a packed cache can be used on the next one
SHORTEST = 20  # seconds that a run takes at least
LARGE = 120  # GiB: a card on which case F fits
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    case: str
    system: str
    parts: int | None = None
    """Micro-batches of a step; None for the fewest that fit, which is where the system is fastest."""
    is_dry: bool = False

    def __str__(self) -> str:
        return f"{self.case} by {self.system}" + (
            f" in {self.parts} micro-batches" if self.parts else ""
        )

    @property
    def about(self) -> Result:
        """What identifies its results, with this machine."""
        return {
            "case": self.case,
            "system": self.system,
            "gib": CASES[self.case].gib,
            "dry_run": self.is_dry,
        }


@dataclass
class Started:
    """A process that waits for a line on its standard input."""

    process: subprocess.Popen[str]
    out: Path
    log: Path
    traces: Path
    about: Result

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def case_of(job: Job) -> Case:
    return tiny(CASES[job.case]) if job.is_dry else CASES[job.case]


def environment_of_a_run() -> dict[str, str]:
    """One cache of compiled kernels, memory in segments that grow, no network."""
    segments = "expandable_segments:True"
    return {
        "HF_HUB_OFFLINE": "1",
        "PYTORCH_ALLOC_CONF": segments,
        "PYTORCH_CUDA_ALLOC_CONF": segments,  # the older name too, for older versions of torch
        "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"),
        "TRITON_CACHE_DIR": str(CACHE / "triton"),
        "TORCH_EXTENSIONS_DIR": str(CACHE / "extensions"),
        "OMP_NUM_THREADS": "8",
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep),
    }


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
        result = run_job(started, job, min(limit, left))
        append(result, write)
        what = (
            result.get("failed")
            or f"{result['tokens_per_second']:,.0f} tokens/s, {result['parts']} micro-batches a step"
        )
        print(f"{job.case} by {job.system}: {what}", flush=True)


def prepare_all(jobs: Sequence[Job], folder: Path, seconds: float) -> None:
    """Write rows and weights before anything is timed; weights in a process that gives the GPU's memory back."""
    os.environ["CPT_CACHE"] = str(folder / "cache")  # used by this benchmark alone
    cases = {
        job.case: case_of(job) for job in jobs if not (folder / job.case / "corpus.hash").exists()
    }
    for name, case in cases.items():
        prepare(case, folder / name)
    if cases:
        words = [
            sys.executable,
            "-m",
            "benchmarks.gpu.initial",
            str(folder),
            *cases,
            *(["--dry-run"] if jobs[0].is_dry else []),
        ]
        subprocess.run(
            words, cwd=ROOT, env=environment_of_a_run(), check=True, timeout=max(1.0, seconds)
        )


def begin_next(waiting: Iterator[Job], folder: Path, write: Path) -> tuple[Job, Started] | None:
    job = next((job for job in waiting if not has_result(read_lines(write), job)), None)
    return None if job is None else (job, begin(job, folder / job.case, write.parent))


def begin(job: Job, folder: Path, traces: Path, *, parts: int | None = None) -> Started:
    """Start a process, up to where it would use the GPU. A trace of its steps is saved in `traces`."""
    parts = parts or job.parts or first_parts(job)
    out, log = folder / f"{job.system}-{parts}.json", folder / f"{job.system}-{parts}.log"
    out.unlink(missing_ok=True)
    words, pipe = words_of(job, parts, folder, out, traces), subprocess.PIPE
    with log.open("w") as file:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=environment_of_a_run(),
            text=True,
            stdin=pipe,
            stdout=file,
            stderr=file,
        )
    return Started(process, out, log, traces, {**job.about, "parts": parts})


def words_of(job: Job, parts: int, folder: Path, out: Path, traces: Path) -> list[str]:
    dry = ["--dry-run"] if job.is_dry else []
    return [
        sys.executable,
        "-m",
        "benchmarks.gpu.run",
        job.case,
        job.system,
        str(folder),
        str(out),
        str(traces.resolve()),
        "--parts",
        str(parts),
        *dry,
    ]


def first_parts(job: Job) -> int:
    """Micro-batches of a step to begin with."""
    parts = CASES[job.case].first_parts.get(job.system, 1)
    return max(1, parts // 2) if has_large_gpu() else parts


def has_large_gpu() -> bool:
    return any(gpu.memory_gib > LARGE for gpu in find_gpus())


def run_job(started: Started, job: Job, seconds: float) -> Result:
    """Run it, and where memory is not enough, again with more and smaller micro-batches, unless their number is
    given."""
    end = time.monotonic() + seconds
    result, case = let_run(started, seconds), CASES[job.case]
    releases = job.system == "cpt" and case.optimizer.get(
        "release_gradients"
    )  # released gradients cannot be accumulated
    while (
        result.get("failed") == OUT_OF_MEMORY
        and not job.parts
        and not releases
        and result["parts"] < case.rows
    ):
        if time.monotonic() > end - SHORTEST:
            break
        result = let_run(
            begin(job, started.out.parent, started.traces, parts=2 * result["parts"]),
            end - time.monotonic(),
        )
    return {**result, "best": job.parts is None}


def let_run(started: Started, seconds: float) -> Result:
    try:
        started.process.communicate("\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        started.stop()
        return {**started.about, "failed": f"took longer than {seconds:.0f} seconds"}
    if started.out.exists():
        return dict(json.loads(started.out.read_text()))
    return {
        **started.about,
        "failed": f"exit code {started.process.returncode}: {last_line(started.log)}",
    }


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""


def read_lines(path: Path) -> list[Result]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(result: Mapping[str, Any], path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


def has_result(known: Sequence[Result], job: Job) -> bool:
    """Whether the job succeeded on this device with these versions."""
    wanted = {**job.about, **here()}
    same = [
        one
        for one in known
        if "failed" not in one and all(one.get(name) == value for name, value in wanted.items())
    ]
    return any(one["best"] if job.parts is None else one["parts"] == job.parts for one in same)


@cache
def here() -> Result:
    return {name: value for name, value in machine().items() if name in ("device", "libraries")}
