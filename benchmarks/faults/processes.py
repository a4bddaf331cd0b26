"""Processes that die, stand still or are of another number; a run that is finished already; a checkpoint with a
program hidden in it."""

import os
import shutil
import signal
import subprocess
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.faults.bad_steps import WITHOUT_DROPOUT, most_apart
from benchmarks.faults.comparing import steps_lost, wrong_samples
from benchmarks.faults.damage import copy_until, files_of
from benchmarks.faults.runs import MOST_SECONDS, System, await_step
from benchmarks.faults.signals import ranks
from benchmarks.faults.started import kill_all, wait
from benchmarks.faults.trials import Outcome, Suite, Trial, against, last_error, resumed, tried
from cpt.checkpoints.manifest import MANIFEST, hash_file, read_manifest, write_manifest
from cpt.checkpoints.model_folder import load_data

STEPS, EVERY = 16, 4
PAUSE: dict[str, Any] = {"kind": "pause", "seconds": 0.3}
SECONDS_BACK = 60.0  # until the job trains again
SECONDS_TO_NOTICE = 150.0  # a hang, under cpt; the plain Trainer's limit is 1,800
PATIENCE_WITH_THE_TRAINER = 60.0


def disturb_processes(suite: Suite) -> list[dict[str, Any]]:
    """All of them, in every kind of run."""
    return tried(suite, FAULTS)


def rank_killed(suite: Suite, system: System, stage: int) -> Outcome:
    """One of two processes is killed."""
    return without_a_rank(suite, system, stage, signal.SIGKILL, SECONDS_BACK)


def rank_stopped(suite: Suite, system: System, stage: int) -> Outcome:
    """One of two processes hangs, as with a hanging network or GPU."""
    return without_a_rank(suite, system, stage, signal.SIGSTOP, SECONDS_TO_NOTICE)


def without_a_rank(
    suite: Suite, system: System, stage: int, number: signal.Signals, limit: float
) -> Outcome:
    """Ours under its supervisor; the plain Trainer under torchrun, which ends the job and starts nothing again."""
    options: dict[str, Any] = {"steps": STEPS, "every": EVERY, "processes": 2}
    straight = suite.straight("processes", system, stage, **options)
    run = suite.run("rank", system, stage, **options)
    process = run.start([PAUSE], supervised=system == "cpt")
    if not await_step(run, process, 7):
        kill_all(process)
        return Outcome(False, f"did not start: {last_error(run.said())}")
    began = time.monotonic()
    ranks(process)[-1].send_signal(number)
    if system == "cpt":
        code = wait(process, MOST_SECONDS)
        back = [line["time"] for line in run.records() if line["attempt"][1] > 0]
        if code != 0 or not back:
            return Outcome(False, f"ended with code {code}: {last_error(run.said())}")
        outcome, seconds = against(run, straight), min(back) - began
        in_time = (
            f"trains again within {limit:.0f} s"
            if seconds <= limit
            else f"trains again after {seconds:.0f} s"
        )
        return Outcome(
            outcome.good and seconds <= limit and steps_lost(run) <= EVERY + 1,
            f"{in_time}; {outcome.what}",
        )
    try:
        code = process.wait(PATIENCE_WITH_THE_TRAINER)
    except subprocess.TimeoutExpired:
        kill_all(process)
        return Outcome(False, f"still hangs after {PATIENCE_WITH_THE_TRAINER:.0f} s")
    return Outcome(
        False,
        f"ended with code {code}, nobody starts it again; by hand: {resumed(run, straight).what}",
    )


def other_number(suite: Suite, system: System, stage: int) -> Outcome:
    """Two processes, then one, then two."""
    options: dict[str, Any] = {
        "steps": STEPS,
        "every": EVERY,
        "processes": 2,
        "sections": WITHOUT_DROPOUT,
    }
    straight = suite.straight("elastic", system, stage, **options)
    run = suite.run("elastic", system, stage, **options)
    for processes, at in ((2, 6), (1, 11)):
        run.processes = processes
        process = run.start([PAUSE])
        came = await_step(run, process, at)
        kill_all(process)
        if not came:
            return Outcome(False, f"{processes} process(es) do not go on: {last_error(run.said())}")
    run.processes = 2
    code = run.finish()
    if code != 0:
        return Outcome(False, f"two processes do not go on: {last_error(run.said())}")
    if wrong := wrong_samples(run, straight):
        return Outcome(False, f"{wrong} steps with other rows")
    near = most_apart(run, straight) <= 1e-3
    return Outcome(
        near,
        "the same rows in the same steps, losses "
        + ("within 0.1 %" if near else "more than 0.1 % apart"),
    )


def finished_already(suite: Suite, system: System, stage: int) -> Outcome:
    """The command of a finished run, typed again."""
    straight = suite.straight("bad-steps", system, stage, steps=STEPS, every=EVERY)
    run = suite.run("finished", system, stage, steps=STEPS, every=EVERY)
    if run.finish() != 0:
        return Outcome(False, last_error(run.said()))
    before = {name: (run.folder / name).read_bytes() for name in files_of(run.folder)}
    code = run.finish()
    after = {name: (run.folder / name).read_bytes() for name in files_of(run.folder)}
    if before == after:
        return Outcome(code == 0, f"nothing changed, exit code {code}")
    more = max(run.made()) - max(straight.made())
    return Outcome(
        False, f"{more} more step(s) trained, {len(after.keys() - before.keys())} new files"
    )


class Planted:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def planted_pickle(suite: Suite, system: System, stage: int) -> Outcome:
    """The newest checkpoint's optimizer holds a program; the manifest, where there is one, is forged to match."""
    straight = suite.straight("bad-steps", system, stage, steps=STEPS, every=EVERY)
    run = suite.run("planted", system, stage, steps=STEPS, every=EVERY)
    copy_until(straight, run, 2 * EVERY)
    import_module("deepspeed")  # whose classes are in its files
    checkpoint, mark = run.folder / f"checkpoint-{2 * EVERY}", run.home / "ran"
    for part in [*checkpoint.rglob("optimizer.pt"), *checkpoint.rglob("*optim_states.pt")]:
        content = load_data(part)
        torch.save({**content, "passenger": Planted(mark)}, part)
    if system == "cpt":
        known = read_manifest(checkpoint)
        forged = {name: hash_file(checkpoint / name) for name in known.files}
        (checkpoint / MANIFEST).unlink()
        write_manifest(checkpoint, type(known)(**{**vars(known), "files": forged}))
    code = run.finish()
    if mark.exists():
        shutil.rmtree(mark)
        return Outcome(False, "the program ran")
    return Outcome(
        code != 0,
        "refused, the program did not run"
        if code != 0
        else "the program did not run, nor was it noticed",
    )


FAULTS: dict[str, Trial] = {
    "one of 2 processes killed": rank_killed,
    "one of 2 processes hangs": rank_stopped,
    "2, then 1, then 2 processes": other_number,
    "a finished run started again": finished_already,
    "program planted in the optimizer's file": planted_pickle,
}
