"""Steps that go wrong: NaN, a spike, too little memory, an exception, a killed data worker."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.faults.comparing import steps_lost, wrong_samples
from benchmarks.faults.runs import Made, System, TrialRun
from benchmarks.faults.trials import Outcome, Suite, Trial, against, last_error, resumed, tried
from tests.tiny import TINY_LLAMA

STEPS, EVERY = 16, 4
WITHOUT_DROPOUT: dict[str, Any] = {
    "model": {"from_scratch": True, "config": TINY_LLAMA}
}  # whose losses depend on the micro-batch
LONG: dict[str, Any] = {"steps": 100, "every": 50}


def make_bad_steps(suite: Suite) -> list[dict[str, Any]]:
    """All of them, in every kind of run."""
    return tried(suite, FAULTS)


def nan_once(suite: Suite, system: System, stage: int) -> Outcome:
    """One step's loss is not a number."""
    run = suite.run("nan", system, stage, steps=STEPS, every=EVERY)
    code = run.finish([{"kind": "nan", "steps": [7]}])
    if code != 0:
        return Outcome(False, f"ended with code {code}: {last_error(run.said())}")
    if not is_finite(run):
        return Outcome(False, "exit code 0, all weights NaN")
    skipped = [event["step"] for event in run.events() if event["kind"] == "nan_skipped"]
    if system == "cpt":
        return Outcome(
            skipped == [7],
            "exactly that step skipped and told" if skipped == [7] else f"skipped steps {skipped}",
        )
    told = "loss': 'nan'" in run.output.read_text() or "loss': nan" in run.output.read_text()
    return Outcome(
        True, "weights finite, loss told as NaN" if told else "weights finite, the log says loss 0"
    )


def nan_five_times(suite: Suite, system: System, stage: int) -> Outcome:
    """Rows of five steps in a row are poison: each time they are read, the loss is not a number."""
    straight = suite.straight("bad-steps", system, stage, steps=STEPS, every=EVERY)
    poisoned = [straight.made()[step].documents[0] for step in range(8, 13)]
    run = suite.run("five-nans", system, stage, steps=STEPS, every=EVERY)
    code, _ = finish_with_restarts(run, system, [{"kind": "nan", "documents": poisoned}])
    if code != 0:
        return Outcome(False, f"ended with code {code}: {last_error(run.said())}")
    if not is_finite(run):
        return Outcome(False, "exit code 0, all weights NaN")
    back = [event for event in run.events() if event["kind"] == "rolled_back"]
    if system == "cpt":
        return Outcome(
            len(back) == 1,
            f"back to a checkpoint {len(back)} time(s), their rows left out; weights finite",
        )
    return Outcome(True, "weights finite")


def spike(suite: Suite, system: System, stage: int) -> Outcome:
    """One step's loss is 10,000 times what it should be."""
    straight = suite.straight("spike", system, stage, **LONG)
    run = suite.run("spike", system, stage, **LONG)
    code = run.finish([{"kind": "spike", "steps": [17]}])
    if code != 0:
        return Outcome(False, f"ended with code {code}: {last_error(run.said())}")
    distance = abs(step_loss(run.made()[100]) / step_loss(straight.made()[100]) - 1)
    skipped = [event["step"] for event in run.events() if event["kind"] == "spike_skipped"]
    how = f"skipped {skipped}" if system == "cpt" else "the update was applied"
    near = "within 1 %" if distance <= 0.01 else "more than 1 % away"
    return Outcome(
        distance <= 0.01 and (system != "cpt" or skipped == [17]),
        f"{how}; last loss {near} from the undisturbed run's",
    )


def out_of_memory(suite: Suite, system: System, stage: int) -> Outcome:
    """From step 7 on 4 rows do not fit, from step 11 on 2 do not."""
    options: dict[str, Any] = {
        "steps": STEPS,
        "every": EVERY,
        "micro_batch": 4,
        "sections": WITHOUT_DROPOUT,
    }
    straight = suite.straight("memory", system, stage, **options)
    run = suite.run("memory", system, stage, **options)
    limits = [
        {"kind": "memory", "steps": list(range(7, STEPS + 1)), "above": 2},
        {"kind": "memory", "steps": list(range(11, STEPS + 1)), "above": 1},
    ]
    code, starts = finish_with_restarts(run, system, limits)
    if code != 0:
        return Outcome(
            False,
            f"ended with code {code} at step {max(run.made())}, and so would every further start",
        )
    if wrong := wrong_samples(run, straight):
        return Outcome(False, f"{wrong} steps with other rows")
    distance = most_apart(run, straight)
    how = "restarted by itself" if starts == 1 else f"{starts - 1} restarts"
    return Outcome(
        distance <= limit_of(stage),
        f"{how}, the same rows in each step, losses within {limit_of(stage):g}",
    )


def finish_with_restarts(
    run: TrialRun, system: System, faults: list[dict[str, Any]]
) -> tuple[int, int]:
    """Start the run again each time it asks for it: one process does so itself, torchrun does not.

    Returns:
        The last exit code, and the number of starts.
    """
    starts = 1
    while (code := run.finish(faults)) != 0 and system == "cpt" and starts < 6:
        if run.status().get("error") != "RestartNeeded":
            break
        starts += 1
    return code, starts


def limit_of(stage: int) -> float:
    """How far losses may be apart: the order of sums in fp32, and in bf16 under DeepSpeed."""
    return 2e-2 if stage else 1e-4


def exception(suite: Suite, system: System, stage: int) -> Outcome:
    """A mistake in somebody's code, in the middle of a step; then the same command again."""
    straight = suite.straight("bad-steps", system, stage, steps=STEPS, every=EVERY)
    run = suite.run("exception", system, stage, steps=STEPS, every=EVERY)
    if run.finish([{"kind": "error", "steps": [11]}]) == 0:
        return Outcome(False, "the exception was lost")
    outcome = resumed(run, straight)
    lost = steps_lost(run)
    return Outcome(outcome.good and lost <= EVERY, f"{lost} steps made again; {outcome.what}")


def worker_killed(suite: Suite, system: System, stage: int) -> Outcome:
    """A worker process of the data loader is killed, for memory most often."""
    options: dict[str, Any] = {
        "steps": STEPS,
        "every": EVERY,
        "training": {"dataloader_num_workers": 2},
    }
    straight = suite.straight("workers", system, stage, **options)
    run = suite.run("worker", system, stage, **options)
    code = run.finish(
        [{"kind": "worker", "steps": [3], "rank": 0}, {"kind": "pause", "seconds": 0.2}]
    )
    if code != 0:
        return Outcome(
            False, f"ended with code {code} at step {max(run.made())}: {last_error(run.said())}"
        )
    outcome = against(run, straight)
    return Outcome(outcome.good, f"replaced; {outcome.what}")


def is_finite(run: TrialRun) -> bool:
    """Whether its exported weights are."""
    return all(bool(tensor.isfinite().all()) for tensor in run.weights().values())


def step_loss(made: Made) -> float:
    """Micro-batches' losses are parts of their step's."""
    return math.fsum(values(made.losses))


def values(losses: Sequence[str]) -> list[float]:
    """As numbers."""
    return [float.fromhex(loss) for loss in losses]


def most_apart(run: TrialRun, straight: TrialRun) -> float:
    """The largest relative distance of two steps' losses."""
    return max(
        abs(step_loss(run.made()[step]) / step_loss(made) - 1)
        for step, made in straight.made().items()
    )


FAULTS: dict[str, Trial] = {
    "NaN at one step": nan_once,
    "NaN at five steps in a row": nan_five_times,
    "loss times 10,000 at one step": spike,
    "out of memory at two steps": out_of_memory,
    "exception in a step": exception,
    "data worker killed": worker_killed,
}
