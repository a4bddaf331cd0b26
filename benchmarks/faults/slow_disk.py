"""A disk on which a save takes seconds: slow_disk.c preloaded into a run, for whatever language writes its files."""

import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("slow_disk.c")
BYTES_PER_SECOND = 250_000.0
SECONDS_OF_SYNC, SECONDS_OF_RENAME = 0.05, 0.4


@dataclass(frozen=True)
class Operation:
    """What the disk was asked to do."""

    began: float
    """Seconds of the monotonic clock."""
    ended: float | None
    """None where it was killed in it."""
    what: str
    """write, hash (a read), sync or rename."""
    path: str


@cache
def library(folder: Path) -> Path:
    """The compiled library, in this folder."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("benchmarks.faults needs a C compiler for its slow disk: apt install gcc")
    built = folder / "slow_disk.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(built), str(SOURCE), "-ldl"], check=True)
    return built


def slowed(work: Path, runs: Path, log: Path) -> dict[str, str]:
    """The environment of a process to which the disk below `runs` is slow.

    Args:
        work: where the library is built.
        log: gets a line for each operation.
    """
    return {
        "LD_PRELOAD": str(library(work)),
        "SLOW_DISK_FOLDER": f"{runs}/",
        "SLOW_DISK_READS": "/.saving/",
        "SLOW_DISK_RATE": str(BYTES_PER_SECOND),
        "SLOW_DISK_SYNC": str(SECONDS_OF_SYNC),
        "SLOW_DISK_RENAME": str(SECONDS_OF_RENAME),
        "SLOW_DISK_LOG": str(log),
    }


def operations(log: Path, after: float = 0.0) -> list[Operation]:
    """What was done on the disk for checkpoints since a time, in its order.

    Args:
        after: seconds of the monotonic clock.
    """
    open_ones: dict[tuple[str, str, str], float] = {}
    done: list[Operation] = []
    for line in log.read_text().splitlines() if log.exists() else []:
        time, pid, when, what, path = line.split(" ", 4)
        if "checkpoint-" not in path or float(time) < after:
            continue
        if when == "begin":
            open_ones[pid, what, path] = float(time)
        elif (began := open_ones.pop((pid, what, path), None)) is not None:
            done.append(Operation(began, float(time), what, path))
    done += [Operation(began, None, what, path) for (_, what, path), began in open_ones.items()]
    return sorted(done, key=lambda one: one.began)
