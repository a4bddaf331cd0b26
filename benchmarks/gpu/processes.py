"""Each run in a process of its own. The next process imports what it needs while the present one trains, and waits for its turn."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES
from benchmarks.gpu.run import OUT_OF_MEMORY
from cpt.hardware import find_gpus

ROOT = Path(__file__).parents[2]
CACHE = Path("/tmp/cpt-gpu-cache")  # the same path on every machine, so that a packed cache can be used on the next one
SHORTEST = 20  # seconds that a run takes at least
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One case by one system."""

    case: str
    system: str
    parts: int | None = None
    """Micro-batches of a step; None for the fewest that fit, which is where the system is fastest."""
    gib: float | None = None
    is_dry: bool = False

    def __str__(self) -> str:
        return f"{self.case} by {self.system}" + (f" in {self.parts} micro-batches" if self.parts else "")


@dataclass
class Started:
    """A process that waits for a line on its standard input."""

    process: subprocess.Popen[str]
    out: Path
    log: Path
    about: Result

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()


def environment_of_a_run() -> dict[str, str]:
    """One cache of compiled kernels, memory in segments that grow, no network."""
    segments = "expandable_segments:True"
    ours = {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep), "HF_HUB_OFFLINE": "1"}
    ours |= {"PYTORCH_ALLOC_CONF": segments, "PYTORCH_CUDA_ALLOC_CONF": segments}  # the older name too, for older versions of torch
    ours |= {"TORCHINDUCTOR_CACHE_DIR": str(CACHE / "inductor"), "TRITON_CACHE_DIR": str(CACHE / "triton")}
    ours |= {"TORCH_EXTENSIONS_DIR": str(CACHE / "extensions"), "OMP_NUM_THREADS": "8"}
    return {**ours, **os.environ, "PYTHONPATH": ours["PYTHONPATH"]}


def words_of(job: Job, parts: int, folder: Path, out: Path) -> list[str]:
    """The command of a run."""
    limit = ["--gib", str(job.gib)] if job.gib is not None else []
    dry = ["--dry-run"] if job.is_dry else []
    return [sys.executable, "-m", "benchmarks.gpu.run", job.case, job.system, str(folder), str(out), "--parts", str(parts), *limit, *dry]


def begin(job: Job, folder: Path, *, parts: int | None = None) -> Started:
    """Start a process, up to where it would use the GPU."""
    parts = parts or job.parts or first_parts(job)
    out, log = folder / f"{job.system}-{parts}.json", folder / f"{job.system}-{parts}.log"
    out.unlink(missing_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            words_of(job, parts, folder, out),
            cwd=ROOT,
            env=environment_of_a_run(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
        )
    about = {"case": job.case, "system": job.system, "parts": parts, "gib": job.gib or CASES[job.case].gib, "dry_run": job.is_dry}
    return Started(process, out, log, about)


def first_parts(job: Job) -> int:
    """Micro-batches of a step to begin with."""
    parts = CASES[job.case].first_parts.get(job.system, 1)
    has_more_memory = any(gpu.memory_gib > 120 for gpu in find_gpus())
    return max(1, parts // 2) if has_more_memory else parts


def let_run(started: Started, seconds: float) -> Result:
    """Run to the end, or until the time is over."""
    try:
        started.process.communicate("\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        started.stop()
        return {**started.about, "failed": f"took longer than {seconds:.0f} seconds"}
    if started.out.exists():
        return dict(json.loads(started.out.read_text()))
    return {**started.about, "failed": f"exit code {started.process.returncode}: {last_line(started.log)}"}


def run_job(started: Started, job: Job, seconds: float) -> Result:
    """Run it, and where memory is not enough, again with more and smaller micro-batches, unless their number is given."""
    end = time.monotonic() + seconds
    result, case = let_run(started, seconds), CASES[job.case]
    releases = job.system == "cpt" and case.optimizer.get("release_gradients")  # released gradients cannot be accumulated
    while result.get("failed") == OUT_OF_MEMORY and not job.parts and not releases and result["parts"] < case.rows:
        if time.monotonic() > end - SHORTEST:
            break
        result = let_run(begin(job, started.out.parent, parts=2 * result["parts"]), end - time.monotonic())
    return {**result, "best": job.parts is None}


def last_line(log: Path) -> str:
    """The last line that a process printed."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""
