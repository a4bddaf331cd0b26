"""Break lines of cpt/ one at a time and check that a test notices: `python -m benchmarks.mutations --seed 7`.

A seed draws the lines and how they break (mutants.py). Each mutant runs the tests that run its lines, of its room and
the promises. A result is written at once below build/mutations, where the same seed continues. `--then default` runs
the other tests of the default run on the survivors, `--then slow` the slow tests, and `--again` the tests that have
changed since. equivalent.yaml lists survivors that do the same as the code.

Without a seed, the lines of lines.yaml break as it says; the exit code is 1 unless each is noticed.
"""

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.mutations import guarded, running
from benchmarks.mutations.covering import KEPT, ROOMS, ROOT, Covering, record
from benchmarks.mutations.mutants import Mutant, kept_sample

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
RESULTS = ROOT / "benchmarks/results/mutations.json"
STEPS = ("room", "default", "slow")  # which tests have seen a mutant
COUNTS = ("mutants", "equivalent", *STEPS)
QUICK = 2.0  # seconds; slower tests run after all of these, and may take longer before they count as hanging
Row = dict[str, Any]


def main() -> None:
    """Try the mutants and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutations", description=__doc__)
    parser.add_argument("--seed", type=int, help="draw mutants; without it, those of lines.yaml")
    parser.add_argument("--table", nargs="+", metavar="SEED", help="only print the rates of seeds")
    parser.add_argument("--count", type=int, default=150, help="mutants to draw (default 150)")
    parser.add_argument("--then", choices=STEPS[1:], help="run more tests on the survivors")
    parser.add_argument("--again", action="store_true", help="try the survivors again")
    parser.add_argument("--only", default="", help="without a seed: a regular expression on lines")
    parser.add_argument("-j", type=int, default=1, help="how many to try at once (default 1)")
    options = parser.parse_args()
    if options.table:
        print_table(options.table)
        return
    with tempfile.TemporaryDirectory(prefix="mutations-") as scratch:
        if options.seed is None:
            sys.exit(guarded.try_lines(options.only, options.j, Path(scratch)))
        try_sample(options, Path(scratch))


def try_sample(options: argparse.Namespace, scratch: Path) -> None:
    """Try what is left of a seed's mutants."""
    step = options.then or "room"
    mutants = kept_sample(KEPT / f"sample-{options.seed}.json", options.seed, options.count)
    kept = KEPT / f"results-{options.seed}.jsonl"
    rows = read_rows(kept)
    if options.again:
        left = [number for number, row in rows.items() if row["status"] == "survived"]
    elif options.then:
        left = [number for number, row in rows.items() if is_left(row, step)]
    else:
        left = [number for number in range(len(mutants)) if number not in rows]
    if not left:
        print_results(options.seed, mutants, rows)
        return
    runs = ("first", *STEPS[1 : STEPS.index(step) + 1])
    maps = {run: Covering(record(run, options.j)) for run in runs}
    seen = {
        number: "" if options.again else rows[number]["step"] for number in left if number in rows
    }
    plan = Plan(mutants, maps, step, seen)
    PLAN.append(plan)
    # a run that is stopped has seen most of its survivors: those that few tests can notice
    left.sort(key=lambda number: sum(plan.tests(number).values()))
    with running.workers(options.j, scratch) as pool:
        for number, result in running.each(pool, try_mutant, left):
            row = (
                result
                if isinstance(result, dict)
                else {"status": "untested", "error": f"{result!r}"}
            )
            rows[number] = {"number": number, "step": step} | row
            with kept.open("a") as stream:
                print(json.dumps(rows[number]), file=stream)
            print_row(mutants[number], rows[number])
        noticing = sorted({row["noticed_by"] for row in rows.values() if row.get("noticed_by")})
        for test in pool.submit(running.failing_unbroken, noticing).result():
            print(
                f"{test} fails where nothing is broken: mutants that only it noticed are left out"
            )
            for row in rows.values():
                if row.get("noticed_by") == test:
                    row["status"] = "untested"
    print_results(options.seed, mutants, rows)


def is_left(row: Row, step: str) -> bool:
    return row["status"] == "survived" and STEPS.index(row["step"]) < STEPS.index(step)


def read_rows(kept: Path) -> dict[int, Row]:
    """The last row of each mutant, by its number."""
    if not kept.exists():
        return {}
    rows = map(json.loads, kept.read_text().splitlines())
    return {row["number"]: row for row in rows}


@dataclass(frozen=True)
class Plan:
    """What the worker processes know, because they are forked."""

    mutants: list[Mutant]
    maps: dict[str, Covering]
    step: str
    seen: dict[int, str]
    """The last step whose tests have run on a mutant."""

    def tests(self, number: int) -> dict[str, float]:
        """Tests that run a mutant's lines and have not run on it, with seconds: the room's and the promises first."""
        mutant, seen = self.mutants[number], self.seen.get(number, "")
        last = mutant.line + len(mutant.before) - 1
        wanted = STEPS[STEPS.index(seen) + 1 if seen else 0 : STEPS.index(self.step) + 1]
        chosen: dict[str, dict[str, float]] = {step: {} for step in STEPS}
        for run, covering in self.maps.items():
            for test, seconds in covering.tests(mutant.file, mutant.line, last).items():
                is_near = test.startswith((f"tests/{mutant.room}/", "tests/promises/"))
                step = "slow" if run == "slow" else "room" if is_near else "default"
                chosen[step][test] = seconds
        return {test: chosen[step][test] for step in wanted for test in chosen[step]}


PLAN: list[Plan] = []


def try_mutant(number: int) -> Row:
    """Run the tests of a step on a mutant."""
    plan, begin = PLAN[0], time.monotonic()
    mutant, tests = plan.mutants[number], plan.tests(number)
    text = mutant.applied()
    if text is None:
        return {"status": "stale", "error": "its line is gone"}
    outcome = running.Outcome(0)
    with running.broken(mutant.file, text):
        for is_slow in (False, True):
            chosen = {
                test: seconds for test, seconds in tests.items() if (seconds > QUICK) == is_slow
            }
            if chosen and outcome.code != 1:
                outcome = run(chosen)
    status = {0: "survived", 1: "noticed", 5: "survived"}.get(outcome.code, "untested")
    return {
        "status": status,
        "noticed_by": outcome.failed,
        "error": outcome.error,
        "tests": len(tests),
        "seconds": round(time.monotonic() - begin, 1),
    }


def run(tests: dict[str, float]) -> running.Outcome:
    """Run tests that took these seconds; today each may take longer, and pay for a fixture that others share."""
    words = ["-m", "slow or not slow", *(test.removeprefix("tests/") for test in tests)]
    return running.run_tests(
        words,
        test_seconds=60 + 5 * max(tests.values()),
        all_seconds=120 + 5 * sum(tests.values()),
        start="forkserver",
    )


# --- results ---


def print_row(mutant: Mutant, row: Row) -> None:
    outcome = row.get("noticed_by") or row.get("error") or f"{row.get('tests')} tests"
    print(
        f"{row['status']:8} {row.get('seconds', 0):6.1f} s  {mutant.file}:{mutant.line} {outcome}"
    )
    if row["status"] == "survived":
        print(mutant.diff, flush=True)


def print_results(seed: int, mutants: list[Mutant], rows: dict[int, Row]) -> None:
    """Write the seed's summary to the results, and print it."""
    reasons = read_reasons()
    tried = [(mutants[number], row) for number, row in sorted(rows.items())]
    survivors = [
        {"file": mutant.file, "line": mutant.line, "tests": row["step"], "diff": mutant.diff}
        | ({"equivalent": reasons[mutant.key]} if mutant.key in reasons else {})
        for mutant, row in tried
        if row["status"] == "survived"
    ]
    survivors.sort(key=lambda one: (one["file"], one["line"]))
    results = guarded.read_results()
    results["device"] = f"{platform.machine()}, {os.cpu_count()} cores"
    results.setdefault("seeds", {})[str(seed)] = {
        "commit": running.git("rev-parse", "--short=12", "HEAD")[0],
        "drawn": len(mutants),
        "seconds": round(sum(row.get("seconds", 0) for _, row in tried)),
        "rooms": {
            room: counts_of([pair for pair in tried if pair[0].room == room], reasons)
            for room in ROOMS
        },
        "survivors": survivors,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    for one in survivors:
        note = f"  # equivalent: {one['equivalent']}" if "equivalent" in one else ""
        print(f"\n{one['file']}:{one['line']}{note}\n{one['diff']}")
    print(f"\nSeed {seed}: {len(tried)} of {len(mutants)} mutants tried")
    print_table([str(seed)])


def print_table(seeds: list[str]) -> None:
    """Rates by room of these seeds together, and of rooms together."""
    results = guarded.read_results()["seeds"]
    rooms = {
        room: sum((Counter(results[seed]["rooms"][room]) for seed in seeds), Counter())
        for room in ROOMS
    }
    far = ("models", "planning")
    rooms["the other seven"] = sum((rooms[room] for room in ROOMS if room not in far), Counter())
    rooms["models, planning"] = sum((rooms[room] for room in far), Counter())
    print(f"| | {' | '.join(COUNTS)} | default run, % | with slow, % |")
    print(f"| --- |{' ---: |' * (len(COUNTS) + 2)}")
    for room, counts in rooms.items():
        total = counts["mutants"] - counts["equivalent"]
        default = counts["room"] + counts["default"]
        rates = f"{rate(default, total)} | {rate(default + counts['slow'], total)}"
        print(f"| {room} | {' | '.join(str(counts[name]) for name in COUNTS)} | {rates} |")


def read_reasons() -> dict[tuple[str, str], str]:
    listed = yaml.safe_load(EQUIVALENT.read_text()) or []
    return {(one["file"], one["diff"].strip()): one["reason"] for one in listed}


def counts_of(tried: list[tuple[Mutant, Row]], reasons: dict[tuple[str, str], str]) -> Row:
    """How many mutants ran, how many of the survivors are equivalent, and how many each step noticed."""
    ran = [pair for pair in tried if pair[1]["status"] in ("noticed", "survived")]
    noticed = [row["step"] for _, row in ran if row["status"] == "noticed"]
    survived = [mutant.key for mutant, row in ran if row["status"] == "survived"]
    equivalent = sum(key in reasons for key in survived)
    steps = {step: noticed.count(step) for step in STEPS}
    return {"mutants": len(ran), "equivalent": equivalent} | steps


def rate(successes: int, trials: int) -> str:
    low, high = wilson(successes, trials)
    return f"{100 * successes / max(trials, 1):.0f} ({100 * low:.0f} to {100 * high:.0f})"


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """A 95 % interval of a share (E. B. Wilson, 1927)."""
    if trials == 0:
        return 0.0, 1.0
    z, share = 1.96, successes / trials
    middle = share + z**2 / (2 * trials)
    width = z * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return (middle - width) / (1 + z**2 / trials), (middle + width) / (1 + z**2 / trials)


if __name__ == "__main__":
    main()
