"""`python -m benchmarks.faults`: inject every fault into real runs of ours and of the plain Trainer: hours on 4 cores.

Writes benchmarks/results/faults.json and its tables in benchmarks/README.md. Results add up while the code of `cpt` is
the same, so the suite can be run in parts: `python -m benchmarks.faults --parts kills --stages 2 --kills 70`.
"""

import argparse
import itertools
import logging
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.bad_steps import make_bad_steps
from benchmarks.faults.damage import damage_everything
from benchmarks.faults.disks import spoil_disks
from benchmarks.faults.goodput import disturb_jobs
from benchmarks.faults.kills import kill_runs
from benchmarks.faults.page import write_page
from benchmarks.faults.processes import disturb_processes
from benchmarks.faults.results import RESULTS, keep
from benchmarks.faults.runs import KINDS, System, prepare
from benchmarks.faults.signals import send_signals
from benchmarks.faults.trials import SYSTEMS, Suite


def kills(suite: Suite) -> list[dict[str, Any]]:
    """Half of them to runs without DeepSpeed, the others to those with it; the plain Trainer gets a sixth of each."""
    found = []
    for stage in suite.stages:
        share = math.ceil(suite.kills * KILLS_OF_STAGES[stage])
        numbers: dict[System, int] = {"cpt": share, "trainer": math.ceil(share / 6)}
        for system, number in [(system, numbers[system]) for system in suite.systems]:
            killed = kill_runs(suite.work, system=system, stage=stage, kills=number)
            found.append({"run": KINDS[stage], **killed})
            print(found[-1], flush=True)
    return found


KILLS_OF_STAGES = {0: 0.5, 2: 0.25, 3: 0.25}
PARTS: dict[str, Callable[[Suite], Any]] = {
    "kills": kills,
    "damage": damage_everything,
    "signals": send_signals,
    "steps": make_bad_steps,
    "disks": spoil_disks,
    "processes": disturb_processes,
    "time": disturb_jobs,
}


def main() -> None:
    """Run the parts that are asked for, and write what happened."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--stages",
        nargs="+",
        type=int,
        choices=(0, 2, 3),
        default=[0, 2, 3],
        help="ZeRO's; 0: without DeepSpeed",
    )
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=SYSTEMS,
        default=list(SYSTEMS),
        help="trainer: the plain one, not of all parts",
    )
    parser.add_argument(
        "--kills", type=int, default=200, help="SIGKILLs in all, most of them inside saves"
    )
    parser.add_argument(
        "--signals", type=int, default=5, help="times that each signal is sent each way"
    )
    parser.add_argument("--repetitions", type=int, default=3, help="of every other fault")
    parser.add_argument(
        "--faults",
        nargs="+",
        help="of the parts signals, steps, disks and processes; by default all",
    )
    parser.add_argument(
        "--anew",
        action="store_true",
        help="forget what was known of these faults in these kinds of runs",
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where; the page is made of the usual place"
    )
    asked = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # which a shell lets its background jobs ignore, and they their children
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as nohup does
    logging.getLogger("cpt").setLevel(logging.ERROR)  # each damaged checkpoint is told otherwise
    with tempfile.TemporaryDirectory() as temporary:
        work = (Path(temporary) / "faults").resolve()
        for part, stage in itertools.product(asked.parts, asked.stages):
            shutil.rmtree(work, ignore_errors=True)
            prepare(work)
            numbers = (asked.kills, asked.signals, asked.repetitions)
            suite = Suite(
                work,
                (stage,),
                *numbers,
                faults=tuple(asked.faults or ()),
                systems=tuple(asked.systems),
            )
            began = time.monotonic()
            found = PARTS[part](suite)
            keep(asked.results, part, found, time.monotonic() - began, anew=asked.anew)
    if asked.results == RESULTS:
        write_page()


if __name__ == "__main__":
    main()
