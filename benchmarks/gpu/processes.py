"""Each run in a process of its own. The next one imports what it needs while the present one trains, and waits for its turn."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case
from benchmarks.gpu.run import MOST_PARTS, OUT_OF_MEMORY

ROOT = Path(__file__).parents[2]
SHORTEST = 20  # seconds that a run takes at least
Result = dict[str, Any]


@dataclass
class Started:
    """A process that waits for a line on its standard input."""

    process: subprocess.Popen[str]
    out: Path
    log: Path
    about: Result

    def stop(self) -> None:
        """It is not needed any more."""
        self.process.kill()
        self.process.communicate()


def words_of(case: Case, system: str, folder: Path, out: Path, parts: int, gib: float | None) -> list[str]:
    """The command."""
    bound = ["--gib", str(gib)] if gib is not None else []
    return [sys.executable, "-m", "benchmarks.gpu.run", case.name, system, str(folder), str(out), "--parts", str(parts), *bound]


def environment_of_a_run() -> dict[str, str]:
    """Memory in segments that grow, and no network."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def begin(case: Case, system: str, folder: Path, *, parts: int = 1, gib: float | None = None) -> Started:
    """Up to where it would touch the GPU."""
    out, log = folder / f"{system}-{parts}.json", folder / f"{system}-{parts}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            words_of(case, system, folder, out, parts, gib),
            cwd=ROOT,
            env=environment_of_a_run(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
        )
    return Started(process, out, log, {"case": case.name, "system": system, "parts": parts, "gib": gib or case.gib})


def let_run(started: Started, seconds: float) -> Result:
    """To its end, or to the end of its time."""
    try:
        started.process.communicate("\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        started.stop()
        return {**started.about, "failed": f"took longer than {seconds:.0f} seconds"}
    if started.out.exists():
        return dict(json.loads(started.out.read_text()))
    return {**started.about, "failed": f"exit code {started.process.returncode}: {last_line(started.log)}"}


def run_apart(started: Started, case: Case, system: str, seconds: float, gib: float | None = None) -> Result:
    """Where a micro-batch has no room, again with halves of it, which the result tells."""
    end = time.monotonic() + seconds
    result = let_run(started, seconds)
    parts = 2
    while result.get("failed") == OUT_OF_MEMORY and parts <= min(MOST_PARTS, case.rows) and time.monotonic() < end - SHORTEST:
        if system == "cpt" and case.optimizer.get("release_gradients"):  # gradients that are dropped cannot add up
            break
        again = begin(case, system, started.out.parent, parts=parts, gib=gib)
        result = let_run(again, end - time.monotonic())
        parts *= 2
    return result


def last_line(log: Path) -> str:
    """Of what a process said."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""
