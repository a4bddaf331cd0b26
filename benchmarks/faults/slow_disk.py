"""A disk on which a save takes seconds: slow_disk.c preloaded into a run, for whatever language writes its files."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("slow_disk.c")
BYTES_PER_SECOND = 160_000.0
SECONDS_OF_SYNC, SECONDS_OF_RENAME = 0.05, 0.3


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


def library(folder: Path) -> Path:
    """The compiled library, in this folder; made anew where the folder was."""
    built = folder / "slow_disk.so"
    if built.exists():
        return built
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("benchmarks.faults needs a C compiler for its slow disk: apt install gcc")
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
    watched = Watched(log, after)
    watched.look()
    return watched.operations()


class Watched:
    """The log as it grows."""

    def __init__(self, log: Path, after: float = 0.0) -> None:
        self.log, self.after, self.read = log, after, 0
        self.done: list[Operation] = []
        self.open_ones: dict[tuple[str, str, str], float] = {}

    def look(self) -> list[Operation]:
        """Read what has come; the operations that began with it."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as file:
            file.seek(self.read)
            lines = file.read().split(b"\n")
        self.read += sum(len(line) + 1 for line in lines[:-1])  # the last one is not whole yet
        return [begun for line in lines[:-1] if (begun := self.take(line.decode())) is not None]

    def take(self, line: str) -> Operation | None:
        """One line; the operation where it tells of a beginning."""
        time, pid, when, what, path = line.split(" ", 4)
        if "checkpoint-" not in path or float(time) < self.after:
            return None
        if when == "begin":
            self.open_ones[pid, what, path] = float(time)
            return Operation(float(time), None, what, path)
        if (began := self.open_ones.pop((pid, what, path), None)) is not None:
            self.done.append(Operation(began, float(time), what, path))
        return None

    def operations(self) -> list[Operation]:
        """Those that ended and those that did not, in the order of their beginnings."""
        cut = [Operation(began, None, what, path) for (_, what, path), began in self.open_ones.items()]
        return sorted([*self.done, *cut], key=lambda one: one.began)
