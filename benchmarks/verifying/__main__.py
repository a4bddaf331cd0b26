"""How long does it take to verify a checkpoint, compared with `cat` of its files? `python -m benchmarks.verifying`: 2
minutes.

Both read the same files in turn, each first in every other pair, so that other load affects both; medians and
quartiles of the pairs. Warm: all files are in the page cache, so only copying and hashing remain. Cold: the page cache
is dropped before each reading (a virtual machine's disk may have its own cache). Writes
benchmarks/results/verifying.json.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import time
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measurement import measurement
from cpt.checkpoints.manifest import FORMAT, Manifest, damages, hash_file, write_manifest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "verifying.json"
SHAPES = {
    "one file": [1.0],
    "as of two processes": [0.2, 0.38, 0.38, 0.04],
}  # shares of the checkpoint
TARGET = 1.0  # of the time of `cat`
Pairs = list[dict[str, float]]


def main() -> None:
    """Measure each shape, cold and warm, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verifying", description=__doc__)
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the disk that is to be measured; by default a temporary folder",
    )
    parser.add_argument("--gib", type=float, default=1.2, help="of a checkpoint")
    parser.add_argument("--pairs", type=int, default=15)
    asked = parser.parse_args()
    with TemporaryDirectory(dir=asked.folder) as scratch:
        samples = measure_all(Path(scratch), asked.gib, asked.pairs)
    RESULTS.write_text(json.dumps(results_of(samples, asked.gib), indent=1) + "\n")


def measure_all(scratch: Path, gib: float, pairs: int) -> dict[str, Pairs]:
    samples = {}
    for shape, shares in SHAPES.items():
        folder = write_checkpoint(
            scratch / shape.replace(" ", "-"), [int(share * gib * 2**30) for share in shares]
        )
        for cold in (False, True):
            samples[f"{shape}, {'cold' if cold else 'warm'}"] = measure(folder, pairs, cold=cold)
    return samples


def write_checkpoint(folder: Path, sizes: list[int]) -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        with (folder / f"{number}.pt").open("wb") as file:
            for start in range(0, size, 2**24):
                file.write(os.urandom(min(2**24, size - start)))
            os.fsync(file.fileno())
    files = {path.name: hash_file(path) for path in folder.iterdir()}
    write_manifest(folder, Manifest(FORMAT, "full", 1, 1, 1, None, "bit-exact", {}, files))
    return folder


def measure(folder: Path, pairs: int, *, cold: bool) -> Pairs:
    """Seconds of both ways, of the clock and of the processors."""
    files = sorted(folder.glob("*.pt"))

    def cat() -> None:
        with open(os.devnull, "wb") as nowhere:
            subprocess.run(["cat", *map(str, files)], stdout=nowhere, check=True)

    def verify() -> None:
        assert damages(folder) == []

    for way in (cat, verify):  # the memory that they need, and the files in the system's
        way()
    samples = []
    for number in range(pairs):
        sample: dict[str, float] = {}
        for way in (cat, verify) if number % 2 else (verify, cat):
            if cold:
                forget(files)
            wall, worked = time.perf_counter(), processor_seconds()
            way()
            sample[way.__name__], sample[f"{way.__name__}_processor"] = (
                time.perf_counter() - wall,
                processor_seconds() - worked,
            )
        samples.append(sample)
    return samples


def forget(files: list[Path]) -> None:
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def processor_seconds() -> float:
    """Of this process and of those that it waited for."""
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def results_of(samples: dict[str, Pairs], gib: float) -> dict[str, Any]:
    """Measurements with their target, and the raw samples."""
    rows = []
    for name, pairs in samples.items():
        for clock, key in (("", ""), (", processor time", "_processor")):
            ratios = [pair[f"verify{key}"] / pair[f"cat{key}"] for pair in pairs]
            rows.append(
                measurement(
                    f"{name}, {gib} GiB: verify / `cat`{clock}",
                    None if key else TARGET,
                    ratios,
                    "ratio",
                )
            )
        for way in ("cat", "verify"):
            speeds = [gib / pair[way] for pair in pairs]
            rows.append(measurement(f"{name}, {gib} GiB: {way}", None, speeds, "GiB/s"))
    return {
        "device": f"{platform.machine()}, {os.cpu_count()} cores, load at the end {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "libraries": {"xxhash": metadata.version("xxhash")},
        "measurements": rows,
        "samples": samples,
    }


if __name__ == "__main__":
    main()
