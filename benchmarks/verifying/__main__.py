"""How long does it take to verify a checkpoint, beside `cat` of its files? `python -m benchmarks.verifying [FOLDER] [GIB]`

Both read the same files in turn, so that whatever else the machine does meets both alike. Cold: the system's copies are dropped before
each reading, and the disk is asked. Warm: all of it is in memory, and only copying and hashing are left.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from cpt.checkpoints.manifest import FORMAT, Manifest, damages, hash_files, write_manifest

PAIRS = 7
SHAPES = {"one file": [1.0], "as of two processes": [0.2, 0.38, 0.38, 0.04]}  # shares of the checkpoint


def main(place: Path, gib: float) -> None:
    """Print a line for each shape, cold and warm; as JSON too."""
    results = []
    with TemporaryDirectory(dir=place) as scratch:
        for shape, shares in SHAPES.items():
            folder = write_checkpoint(Path(scratch) / shape.replace(" ", "-"), [int(share * gib * 2**30) for share in shares])
            files = sorted(path for path in folder.iterdir() if path.suffix == ".pt")
            for cold in (True, False):
                results.append(measure(folder, files, cold) | {"shape": shape, "cold": cold, "gib": gib})
                print(json.dumps(results[-1]))


def write_checkpoint(folder: Path, sizes: list[int]) -> Path:
    """Random bytes, sealed."""
    folder.mkdir()
    for number, size in enumerate(sizes):
        with (folder / f"{number}.pt").open("wb") as file:
            for start in range(0, size, 2**24):
                file.write(os.urandom(min(2**24, size - start)))
            os.fsync(file.fileno())
    files = hash_files(folder, [path.name for path in folder.iterdir()])
    write_manifest(folder, Manifest(FORMAT, "full", 1, 1, 1, 1, None, "bit-exact", "", "", {}, files))
    return folder


def measure(folder: Path, files: list[Path], cold: bool) -> dict[str, float]:
    """Medians of pairs, the order changing from pair to pair."""

    def cat() -> None:
        with open(os.devnull, "wb") as nowhere:
            subprocess.run(["cat", *map(str, files)], stdout=nowhere, check=True)

    def verify() -> None:
        assert damages(folder) == []

    pairs = []
    for number in range(PAIRS):
        ways = (cat, verify) if number % 2 else (verify, cat)
        seconds = {way: timed(way, files, cold) for way in ways}
        pairs.append((seconds[cat], seconds[verify]))
    return {
        "cat_seconds": round(statistics.median(one for one, _ in pairs), 3),
        "verify_seconds": round(statistics.median(other for _, other in pairs), 3),
        "verify_over_cat": round(statistics.median(other / one for one, other in pairs), 3),
    }


def timed(work: Callable[[], None], files: list[Path], cold: bool) -> float:
    """Seconds of the wall clock."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        if cold:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), float(sys.argv[2]) if len(sys.argv) > 2 else 1.2)
