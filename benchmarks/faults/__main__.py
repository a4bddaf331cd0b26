"""`python -m benchmarks.faults`: inject every fault into real runs of ours and of the plain Trainer: hours on 4 cores.

Writes benchmarks/results/faults.json and the table of docs/reliability.md. A part that is run again replaces what was known of it, so the
suite can be run in pieces: `python -m benchmarks.faults --parts kills --stages 2 --kills 70 --workers 2`.
"""

import argparse
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_steps import make_bad_steps
from benchmarks.faults.damage import damage_everything
from benchmarks.faults.disks import spoil_disks
from benchmarks.faults.goodput import effective_time
from benchmarks.faults.kills import kill_runs
from benchmarks.faults.page import write_page
from benchmarks.faults.processes import disturb_processes
from benchmarks.faults.results import RESULTS, results_of
from benchmarks.faults.runs import System, prepare
from benchmarks.faults.signals import send_signals
from benchmarks.faults.trials import Suite
from tests.loopback_hub import Hub


def kills(suite: Suite) -> list[dict[str, Any]]:
    """Spread over the kinds of runs; the plain Trainer, without DeepSpeed, gets a tenth of them."""
    shares: list[tuple[System, int, int]] = [("cpt", stage, math.ceil(suite.kills / len(suite.stages))) for stage in suite.stages]
    shares.append(("trainer", suite.stages[0], max(1, suite.kills // 10)))
    found = []
    for system, stage, share in shares:
        killed = kill_runs(suite.work, system=system, stage=stage, kills=share, workers=suite.workers)
        found.append({"run": suite.kind(stage), **killed})
        print(found[-1], flush=True)
    return found


PARTS: dict[str, Callable[[Suite], Any]] = {
    "kills": kills,
    "damage": damage_everything,
    "signals": send_signals,
    "steps": make_bad_steps,
    "disks": spoil_disks,
    "processes": disturb_processes,
    "time": effective_time,
}


def main() -> None:
    """Run the parts that are asked for, and write what happened."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--stages", nargs="+", type=int, choices=(0, 2, 3), default=[0, 2, 3], help="ZeRO's; 0: without DeepSpeed")
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all, half of them inside saves")
    parser.add_argument("--signals", type=int, default=20, help="times that each signal is sent each way")
    parser.add_argument("--repetitions", type=int, default=3, help="of every other fault")
    parser.add_argument("--damages", type=int, default=5, help="kinds of damage to each file that the plain Trainer is started with")
    parser.add_argument("--workers", type=int, default=1, help="runs that are killed at the same time")
    parser.add_argument("--work", type=Path, help="a folder for the runs, which is emptied; by default a temporary one")
    parser.add_argument("--data", choices=("local", "streamed"), default="local", help="streamed: from a Hub on this machine")
    asked = parser.parse_args()
    logging.getLogger("cpt").setLevel(logging.ERROR)  # each damaged checkpoint is told otherwise
    with tempfile.TemporaryDirectory() as temporary, Hub() as hub:
        work = (asked.work or Path(temporary) / "faults").resolve()
        for part in asked.parts:
            shutil.rmtree(work, ignore_errors=True)
            streamed = asked.data == "streamed"
            prepare(work, hub if streamed else None)
            numbers = (asked.kills, asked.signals, asked.repetitions, asked.workers, asked.damages)
            suite = Suite(work, tuple(asked.stages), *numbers, streamed=streamed)
            began = time.monotonic()
            keep(part, PARTS[part](suite), time.monotonic() - began)
        hub.shutdown()


def keep(part: str, found: Any, seconds: float) -> None:
    """Put a part's findings beside those of the others; kinds of runs that were left out this time stay as they were."""
    known = json.loads(RESULTS.read_text())["parts"] if RESULTS.exists() else {}
    before = known.get(part, {"minutes": 0.0, "found": []})
    if isinstance(found, list) and isinstance(before["found"], list):
        new = {row["run"] for row in found}
        found = [row for row in before["found"] if row["run"] not in new] + found
    known[part] = {"minutes": round(before["minutes"] + seconds / 60, 1), "found": found}
    RESULTS.write_text(json.dumps(results_of(known), indent=1) + "\n")
    write_page()


if __name__ == "__main__":
    main()
