"""`python -m benchmarks.gpu.session PHASE`: all GPU measurements in five commands of at most ten minutes, on rented
machines.

Each result is a line of OUT/results.jsonl as soon as it is there. A phase skips what has a result, also one of earlier
calls (`--from`). A run that failed is repeated, last. At 9:15 the phase stops, prints a table, and packs the compiled
kernels for the next machine. Repeat a phase that was cut off. The commands are in benchmarks/README.md. `--cases A B
--systems cpt bare` runs those instead of a phase. `--dry-run` uses tiny shapes on a CPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import psutil

from benchmarks.gpu.cases import CASES, SYSTEMS
from benchmarks.gpu.page import format_results
from benchmarks.gpu.processes import (
    CACHE,
    ROOT,
    SHORTEST,
    Job,
    append,
    environment_of_a_run,
    has_large_gpu,
    has_result,
    here,
    read_lines,
    run_jobs,
)
from benchmarks.gpu.watch import nvidia_smi
from cpt.hardware import find_gpus

MINUTES = 9.25  # of the ten that a command may take
PACKING = 20  # seconds at the end, to pack the cache and to print
MOST_PACKED = 15.5e6  # bytes
LIMIT = 170  # seconds of one run
LIMIT_OF_DRY_RUN = 900  # on a busy CPU
MOST_OF_DOCTOR = 8000  # characters
PYTEST = ("-m", "pytest", "-m", "gpu", "-q", "-rf", "-p", "no:cacheprovider")
AT_EQUAL_ROWS = ("cpt", "liger", "trainer")  # whose memory is compared


@dataclass(frozen=True)
class GpuTests:
    """Tests under tests/gpu, by their node ids: pytest ends with an error where one of them does not exist."""

    name: str
    ids: tuple[str, ...]
    seconds: float
    """Estimated."""

    @property
    def limit(self) -> float:
        """Seconds; the first start of a machine may be slow."""
        return 2 * self.seconds

    @property
    def paths(self) -> list[str]:
        return [f"tests/gpu/{test}" for test in self.ids]


@dataclass(frozen=True)
class Module:
    """A module under benchmarks/gpu that appends lines to the results and skips those that are there."""

    name: str
    seconds: float
    """Estimated, and the limit."""


@dataclass(frozen=True)
class Doctor:
    """`cpt doctor`: what the machine has, before anything is measured on it."""

    seconds: float = 15


Step = Doctor | GpuTests | Module | Job
OFFLOAD = GpuTests(
    "DeepSpeed profiles", ("test_training.py::test_each_deepspeed_profile_trains_in_bf16",), 120
)
KERNELS = GpuTests("kernels", ("test_loss.py", "test_varlen.py", "test_optimizers.py"), 120)
FSDP = GpuTests("FSDP2", ("test_fsdp.py",), 50)
STEPS = GpuTests("steps", ("test_recomputing.py", "test_steps.py"), 80)
WAYS = GpuTests(
    "other ways to train",
    ("test_adapters.py", "test_qlora.py", "test_long_rows.py", "test_zero3.py"),
    150,
)
WHOLE_RUNS = GpuTests(
    "whole runs",
    (
        "test_training.py::test_the_gpu_is_used_and_agrees_with_the_cpu",
        "test_training.py::test_a_run_on_the_gpu_resumes_bit_for_bit",
        "test_stages.py::test_a_stage_learns_in_bfloat16[sft]",
        "test_stages.py::test_preferences_with_masks_have_finite_gradients",
    ),
    150,
)
MICRO = Module("micro", 150)
# Estimated seconds of a run with the start of its process, most of which passes while the run before it trains.
SECONDS_OF_RUN = {"cpt": 55, "trainer": 45, "liger": 45, "expert": 80, "bare": 80}
SECONDS_OF_A_CASE = {
    "A": 5,
    "B": 10,
    "C": 10,
    "D": 10,
    "G": 15,
}  # rows and weights; 8B models take longest
SECONDS_OF_LARGE_CASE = 25
SECONDS_OF_IMPORTS = 15


def by(system: str, cases: Iterable[str], *, equal: bool = False) -> list[Job]:
    """Runs of some cases by a system, where it is fastest or at equal micro-batches."""
    return [
        Job(case, system, CASES[case].equal_parts if equal else None)
        for case in cases
        if system in CASES[case].systems
    ]


PHASES: dict[int, list[Step]] = {
    1: [Doctor(), OFFLOAD, KERNELS, FSDP, *by("cpt", "C"), STEPS],
    2: [*by("cpt", "BA"), WAYS, MICRO, *by("cpt", "C", equal=True)],
    3: [
        *by("bare", "CB"),
        *by("expert", "CB"),
        *by("trainer", "C"),
        *by("liger", "C"),
        *by("trainer", "C", equal=True),
    ],
    4: [*by("cpt", "DEFGH"), *by("expert", "E")],
    5: [WHOLE_RUNS, *by("expert", "DA"), *by("bare", "A"), *by("trainer", "A"), *by("liger", "A")],
}


def estimated_seconds(steps: Sequence[Step]) -> float:
    """Of a phase, by the estimates of its steps, on a machine where nothing is prepared or compiled."""
    total: float = SECONDS_OF_IMPORTS
    cases: set[str] = set()
    for step in steps:
        if isinstance(step, Job):
            total += SECONDS_OF_RUN[step.system]
            cases.add(step.case)
        else:
            total += step.seconds
    return total + sum(SECONDS_OF_A_CASE.get(case, SECONDS_OF_LARGE_CASE) for case in cases)


def chosen(cases: Sequence[str], systems: Sequence[str]) -> list[Step]:
    """Each case by each system where it is fastest, then some of them with equal micro-batches."""
    compared = [case for case in cases if CASES[case].equal_parts > 1]
    best = [job for case in cases for system in systems for job in by(system, [case])]
    return [
        *best,
        *(
            job
            for system in systems
            if system in AT_EQUAL_ROWS
            for job in by(system, compared, equal=True)
        ),
    ]


@dataclass
class Session:
    out: Path
    end: float  # by time.monotonic()
    is_dry: bool
    folder: Path  # for rows, weights and logs

    @property
    def results(self) -> Path:
        return self.out / "results.jsonl"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.end - time.monotonic()

    def add(self, **line: object) -> None:
        append({**line, "dry_run": self.is_dry}, self.results)

    def command(self, words: Sequence[str], log: str, limit: float) -> tuple[int, str]:
        """Run a command within a limit and the deadline, with a log in OUT. Returns its exit code, or 124, and its
        output."""
        path = self.out / log
        with path.open("a") as file:
            began = file.tell()
            process = subprocess.Popen(
                words,
                cwd=ROOT,
                env=environment_of_a_run(),
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            try:
                code = process.wait(max(1.0, min(limit, self.left)))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                code = 124
        return code, path.read_text(errors="replace")[began:]

    def jobs(self, steps: Sequence[Step]) -> list[Job]:
        """Runs without a result; those that failed in an earlier call come last. F takes one row where memory is
        small."""
        jobs = [replace(step, is_dry=self.is_dry) for step in steps if isinstance(step, Job)]
        if not has_large_gpu():
            jobs = [replace(job, case="F1") if job.case == "F" else job for job in jobs]
        known = read_lines(self.results)
        failed = {
            (one["case"], one["system"]) for one in known if "failed" in one and "system" in one
        }
        return sorted(
            (job for job in jobs if not has_result(known, job)),
            key=lambda job: (job.case, job.system) in failed,
        )

    def run(self, steps: Sequence[Step]) -> None:
        """Run the steps in order, successive runs of cases in one go. A step that fails is reported, and the next one
        follows."""
        for is_job, group in groupby(steps, key=lambda step: isinstance(step, Job)):
            if is_job:
                self.run_cases(self.jobs(list(group)))
                continue
            for step in group:
                self.run_step(step)

    def run_cases(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        limit = LIMIT_OF_DRY_RUN if self.is_dry else LIMIT
        self.attempt(
            "runs",
            lambda: run_jobs(jobs, self.folder, end=self.end, limit=limit, write=self.results),
        )

    def run_step(self, step: Step) -> None:
        if isinstance(step, Doctor):
            self.attempt("doctor", self.run_doctor)
        elif isinstance(step, GpuTests):
            self.attempt(step.name, lambda: self.run_tests(step))
        elif isinstance(step, Module):
            self.attempt(step.name, lambda: self.run_module(step))

    def attempt(self, name: str, step: Callable[[], None]) -> None:
        """Whatever fails, what follows is still worth the machine's time."""
        if self.left < SHORTEST:
            print(f"no time left for: {name}", flush=True)
            return
        began = time.monotonic()
        try:
            step()
        except Exception as problem:
            self.add(step="problem", name=name, failed=f"{type(problem).__name__}: {problem}"[:300])
            print(f"{name}: {type(problem).__name__}: {problem}", flush=True)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)

    def run_doctor(self) -> None:
        code, output = self.command([sys.executable, "-m", "cpt", "doctor"], "doctor.log", 60)
        self.add(step="doctor", code=code, output=output[:MOST_OF_DOCTOR])
        print(output, flush=True)

    def run_tests(self, tests: GpuTests) -> None:
        """pytest, unless all of them passed before. A dry run collects them only."""
        earlier = [line for line in read_lines(self.results) if line.get("step") == "tests"]
        if any(line["name"] == tests.name and line["code"] == 0 for line in earlier):
            return
        words = [
            sys.executable,
            *PYTEST,
            *(["--collect-only"] if self.is_dry else []),
            *tests.paths,
        ]
        code, output = self.command(words, "tests.log", tests.limit)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+.*)$", output, re.MULTILINE)
        last = [line for line in output.splitlines() if line.strip()][-1:]
        self.add(
            step="tests",
            name=tests.name,
            code=code,
            summary="".join(last)[:200],
            failed_tests=failed[:30],
        )

    def run_module(self, module: Module) -> None:
        dry = ["--dry-run"] if self.is_dry else []
        words = [sys.executable, "-m", f"benchmarks.gpu.{module.name}", str(self.results), *dry]
        code, _ = self.command(words, f"{module.name}.log", module.seconds)
        if code:
            raise RuntimeError(
                "it was cut off" if code == 124 else f"exit code {code}, see {module.name}.log"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.session", description=__doc__)
    parser.add_argument("phase", type=int, choices=PHASES, nargs="?")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="instead of a phase")
    parser.add_argument(
        "--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), help="of the cases"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT") or "build/gpu"),
        help="default: $OUT, or build/gpu",
    )
    parser.add_argument(
        "--from",
        dest="earlier",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="results.jsonl, kernels.tar.xz",
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="deadline of the whole command"
    )
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    options = parser.parse_args()
    if (options.phase is None) == (options.cases is None):
        parser.error("expected a phase or --cases")
    running = (
        time.time() - psutil.Process().create_time()
    )  # what imports took is in the limit of the command, too
    end = time.monotonic() - running + 60 * options.minutes - PACKING
    if not options.dry_run and not find_gpus():
        raise SystemExit("This needs an NVIDIA GPU. To try it on a CPU: --dry-run")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(environment_of_a_run())
    with tempfile.TemporaryDirectory() as temporary:
        session = Session(options.out, end, options.dry_run, Path(temporary))
        take_earlier(options.earlier, session)
        device = {
            **here(),
            "nvidia_smi": nvidia_smi("name,memory.total,driver_version,clocks.max.sm,power.limit"),
        }
        session.add(step="machine", **device)
        print(json.dumps(device), flush=True)
        session.run(
            PHASES[options.phase] if options.phase else chosen(options.cases, options.systems)
        )
    if not options.dry_run:
        pack(CACHE, options.out / "kernels.tar.xz", end + PACKING - time.monotonic() - 5)
    table = format_results(read_lines(session.results))
    (options.out / "table.txt").write_text(table + "\n")
    print(table)


def take_earlier(files: Sequence[Path], session: Session) -> None:
    """Lines of earlier results that are not there yet, and compiled kernels."""
    for file in files:
        if file.suffix == ".jsonl":
            there = read_lines(session.results)
            for line in read_lines(file):
                if line not in there:
                    append(line, session.results)
        else:
            CACHE.mkdir(parents=True, exist_ok=True)
            with tarfile.open(file) as archive:
                archive.extractall(CACHE, filter="data")


def pack(cache: Path, target: Path, seconds: float) -> None:
    """Pack compiled graphs first, then kernels, until the archive is full or the time is over. The rest is compiled
    again."""
    end = time.monotonic() + max(5.0, seconds)
    folders = [
        path
        for path in (
            cache / "inductor" / "fxgraph",
            cache / "inductor" / "aotautograd",
            cache / "triton",
        )
        if path.exists()
    ]
    others = [path for path in (cache / "inductor").glob("*") if path not in folders]
    partial = target.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=1) as archive:
        for path in (
            file
            for folder in (*folders, *others)
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ):
            if (
                time.monotonic() > end
                or partial.stat().st_size + path.stat().st_size / 2 > MOST_PACKED
            ):
                break
            archive.add(path, arcname=str(path.relative_to(cache)))
    partial.replace(target)


if __name__ == "__main__":
    main()
