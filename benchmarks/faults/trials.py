"""What the parts of the suite share: undisturbed runs to compare with, and how a trial came out, in the same words for
both systems."""

import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.comparing import same_losses, same_weights, wrong_samples
from benchmarks.faults.runs import KINDS, System, TrialRun

SYSTEMS: tuple[System, ...] = ("cpt", "trainer")


@dataclass(frozen=True)
class Outcome:
    """How one trial came out."""

    good: bool
    what: str
    """In words that are the same for the same outcome."""


@dataclass
class Suite:
    """What is asked for, and the undisturbed runs made so far.

    Args:
        work: a folder for all runs.
        stages: ZeRO's; 0 is without DeepSpeed.
    """

    work: Path
    stages: tuple[int, ...] = (0, 2, 3)
    kills: int = 200
    signals: int = 5
    repetitions: int = 1
    faults: tuple[str, ...] = ()
    """Those to try of a part; none: all."""
    systems: tuple[System, ...] = SYSTEMS
    known: dict[str, TrialRun] = field(default_factory=dict)
    made: int = 0

    def run(self, name: str, system: System, stage: int, **options: Any) -> TrialRun:
        """A new run."""
        self.made += 1
        return TrialRun(self.work, f"{self.made:03d}-{name}-{stage}", system, stage, **options)

    def straight(self, name: str, system: System, stage: int, **options: Any) -> TrialRun:
        """The undisturbed run of this name, made once."""
        key = f"{name} {system} {stage}"
        if key not in self.known:
            self.known[key] = self.run(f"{name}-straight", system, stage, **options).straight()
        return self.known[key]


Trial = Callable[[Suite, System, int], Outcome]


def tried(
    suite: Suite, faults: Mapping[str, Trial], stages: Iterable[int] | None = None
) -> list[dict[str, Any]]:
    """Inject each fault into each kind of run of both systems."""
    found = []
    for fault, trial in faults.items():
        if suite.faults and fault not in suite.faults:
            continue
        for stage in suite.stages if stages is None else stages:
            for system in suite.systems:
                outcomes = [
                    tried_once(trial, suite, system, stage) for _ in range(suite.repetitions)
                ]
                found.append(told(fault, KINDS[stage], system, outcomes))
    return found


def tried_once(trial: Callable[..., Any], *arguments: Any) -> Any:
    """One trial; a mistake in the suite itself counts as a bad outcome, and does not cost the hours of the trials
    before it."""
    try:
        return trial(*arguments)
    except Exception as problem:
        traceback.print_exc()
        return Outcome(False, f"the suite failed: {problem!r}"[:160])


def told(fault: str, run: str, system: System, outcomes: list[Outcome]) -> dict[str, Any]:
    """Count how trials came out."""
    row = {
        "fault": fault,
        "run": run,
        "system": system,
        "trials": len(outcomes),
        "good": sum(outcome.good for outcome in outcomes),
        "outcomes": dict(Counter(outcome.what for outcome in outcomes).most_common()),
    }
    print(
        f"{fault}, {run}, {system}: {row['good']} of {row['trials']} good: {row['outcomes']}",
        flush=True,
    )
    return row


def against(run: TrialRun, straight: TrialRun) -> Outcome:
    """How a run that came to its end compares with the undisturbed one."""
    if not run.is_done():
        return Outcome(False, "did not come to its end")
    if wrong := wrong_samples(run, straight):
        return Outcome(False, f"{wrong} steps with other rows")
    if not same_weights(run, straight):
        return Outcome(False, "the same rows, other weights")
    if not same_losses(run, straight):
        return Outcome(False, "the same weights, other losses on the way")
    return Outcome(True, "bit for bit the undisturbed run")


def resumed(run: TrialRun, straight: TrialRun) -> Outcome:
    """Start it again, and compare."""
    code = run.finish()
    if code != 0:
        return Outcome(False, f"the next start ended with code {code}: {last_error(run.said())}")
    return against(run, straight)


def last_error(text: str) -> str:
    """What Python says of the last error that a launcher did not make of another, without what is another in each
    trial."""
    named = [
        error
        for error in re.findall(r"[\w.]+(?:Error|Exception)(?:: .+|$)", text, re.MULTILINE)
        if "ChildFailedError" not in error
    ]
    last = (named or text.splitlines() or [""])[-1]
    return re.sub(r"\bpid \d+", "pid", re.sub(r"(?:/[\w.-]+)+/runs/run", "run", last))[:200]
