"""How fast is a step on a GPU? `python -m benchmarks.gpu --cases A B C`, then `--cases D E F`: 9 minutes each on one H100 or H200.

Each case by each system in a process of its own, one after the other, so that what else the machine does meets all of them. Each result is
appended to benchmarks/results/gpu.jsonl as it comes; what stands there of the same device and versions is not run again, so a command that
was cut off can be repeated. `--dry-run` goes through all cases and systems on a CPU, with tiny shapes, and keeps nothing.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CASES, SYSTEMS, Case, tiny
from benchmarks.gpu.corpus import prepare
from benchmarks.gpu.gates import gates_of, told
from benchmarks.gpu.initial import WEIGHTS, write_initial
from benchmarks.gpu.run import MOST_PARTS, OUT_OF_MEMORY, machine, run_one
from cpt.hardware import find_gpus

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "gpu.jsonl"
Result = dict[str, Any]


def main() -> None:
    """Run what is asked for, and say which gates are reached."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["A", "B", "C"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--minutes", type=float, default=9.0, help="no run is begun after these")
    parser.add_argument("--limit", type=float, default=150, help="seconds of one run")
    parser.add_argument("--gib", type=float, help="hold each process to so much of the GPU's memory")
    parser.add_argument("--anew", action="store_true", help="also what has a result")
    parser.add_argument("--write", type=Path, default=RESULTS)
    parser.add_argument("--dry-run", action="store_true")
    asked = parser.parse_args()
    wanted = [(CASES[name], system) for name in asked.cases for system in asked.systems if system in CASES[name].systems]
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["CPT_CACHE"] = str(Path(temporary) / "cache")  # of this benchmark alone
        if asked.dry_run:
            dry_run(wanted, Path(temporary))
            return
        if not find_gpus():
            raise SystemExit("This needs an NVIDIA GPU. To see that it would start: --dry-run")
        end = time.monotonic() + 60 * asked.minutes
        there = [] if asked.anew else read(asked.write)
        for case, system in wanted:
            if has_result(there, case.name, system, asked.gib):
                print(f"{case.name} by {system}: has a result", flush=True)
            elif time.monotonic() > end - 20:
                print(f"{case.name} by {system}: left for another time", flush=True)
            else:
                folder = prepared(case, Path(temporary))
                keep(run_apart(case, system, folder, min(asked.limit, end - time.monotonic()), asked.gib), asked.write)
    print(told(gates_of(read(asked.write))))


def prepared(case: Case, folder: Path) -> Path:
    """Rows of the case, and its weights, which cases of one shape share."""
    place = folder / case.name
    if not place.exists():
        prepare(case, place)
        like = next(other.name for other in CASES.values() if other.config == case.config)
        weights = folder / f"weights-{like}"
        if not weights.exists():
            words = [sys.executable, "-m", "benchmarks.gpu.initial", case.name, str(weights)]
            subprocess.run(words, cwd=ROOT, env=environment_of_a_run(), check=True)
        (place / WEIGHTS).symlink_to(weights / WEIGHTS)
    return place


def environment_of_a_run() -> dict[str, str]:
    """Memory in segments that grow, and no network."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def run_apart(case: Case, system: str, folder: Path, limit: float, gib: float | None) -> Result:
    """In a fresh process; where a micro-batch has no room, again with halves of it, which the result tells."""
    environment, end, parts = environment_of_a_run(), time.monotonic() + limit, 1
    while True:
        out = folder / f"{system}-{parts}.json"
        words = [sys.executable, "-m", "benchmarks.gpu.run", case.name, system, str(folder), str(out), "--parts", str(parts)]
        words += ["--gib", str(gib)] if gib is not None else []
        result: Result = {"case": case.name, "system": system, "parts": parts, "gib": gib or case.gib}
        try:
            with (folder / f"{system}-{parts}.log").open("w") as log:
                code = subprocess.run(words, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=end - time.monotonic()).returncode
            result = json.loads(out.read_text()) if out.exists() else {**result, "failed": f"exit code {code}: {last_line(log.name)}"}
        except subprocess.TimeoutExpired:
            result["failed"] = f"took longer than {limit:.0f} seconds"
        again = result.get("failed") == OUT_OF_MEMORY and parts < min(MOST_PARTS, case.rows)
        if not again or time.monotonic() > end - 20 or system == "cpt" and not case.training.get("max_grad_norm", 1):
            return result
        parts *= 2


def last_line(log: str) -> str:
    """Of what a process said."""
    lines = [line for line in Path(log).read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][-300:] if lines else ""


def keep(result: Result, path: Path) -> None:
    """One line more, on the disk at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")
    what = result.get("failed") or f"{result['tokens_per_second']:,.0f} tokens/s"
    print(f"{result['case']} by {result['system']}: {what}", flush=True)


def read(path: Path) -> list[Result]:
    """All results, the newest of each kind last."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def has_result(there: list[Result], case: str, system: str, gib: float | None) -> bool:
    """Of this device and these versions; a failure is none."""
    here = machine()
    same = [one for one in there if (one["case"], one["system"], one["gib"]) == (case, system, gib or CASES[case].gib)]
    return any("failed" not in one and all(one[name] == here[name] for name in ("device", "libraries")) for one in same)


def dry_run(wanted: list[tuple[Case, str]], folder: Path) -> None:
    """In children of this process, which has everything imported."""
    results = []
    for case, system in wanted:
        place = folder / case.name
        if not place.exists():
            prepare(tiny(case), place)
            in_a_child(write_initial, tiny(case), place)
        out = folder / f"{case.name}-{system}.json"
        in_a_child(run_one, case.name, system, place, out, is_dry=True, parts=2 if case.name == "B" else 1)
        results.append(json.loads(out.read_text()))
        losses = results[-1]["losses"]
        print(f"{case.name} by {system}: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    print(told([one for one in gates_of(results) if "losses" in one.name and one.reached is not None]))  # nothing else means anything here


def in_a_child(function: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """What a process does and leaves behind is its own."""
    child = multiprocessing.get_context("fork").Process(target=function, args=arguments, kwargs=options)
    child.start()
    child.join(timeout=120)
    if child.exitcode != 0:
        raise SystemExit(f"{function.__name__}{arguments}: exit code {child.exitcode}")


if __name__ == "__main__":
    main()
