"""What remains of a run that fails: a checkpoint of the finished step, and an error that names the lost processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.checkpoints.resume import published_checkpoints, step_of
from cpt.errors import CptError, Interrupted, LaunchError
from cpt.ranks import is_main_process, rank, same_command, world_size
from cpt.runs.events import record_event
from cpt.runs.folder import is_alive
from cpt.runs.heartbeats import LastHeartbeat, is_of_this_host, name_processes, read_heartbeats
from cpt.runs.record import Run
from cpt.training.heartbeat import lost_others
from cpt.training.trainer import CPTTrainer

SECONDS_FOR_AN_ANSWER = 8.0  # four pulses
SECONDS_BETWEEN_LOOKS = 0.2


class StepBoundary(TrainerCallback):
    """Knows whether a step is half done: then weights and position do not belong together."""

    def __init__(self) -> None:
        self.is_within = False

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.is_within = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.is_within = False


@contextmanager
def saved_on_errors(trainer: CPTTrainer) -> Iterator[None]:
    """While it is open: an exception between two steps saves what was trained; any other names the checkpoint that the
    run resumes from.

    With several processes nothing is saved: the others do not know that this one has failed, and wait for its part of
    the next step.
    """
    boundary = StepBoundary()
    trainer.add_callback(boundary)
    try:
        yield
    except CptError:
        raise
    except Exception as problem:
        step, folder = trainer.state.global_step, trainer.run_folder
        known = [step_of(checkpoint) for checkpoint in published_checkpoints(folder)]
        if world_size() == 1 and not boundary.is_within and step > max(known, default=0):
            trainer.checkpointer.save_once("full")
            trainer.checkpointer.wait_for_saves()
        if is_main_process() and not lost_others(problem):
            what = f"The run failed after step {step}: {type(problem).__name__}: {problem}."
            record_event(folder, "failed", f"{what} {resumes_from(folder)}", step=step)
        raise


def resumes_from(folder: Path) -> str:
    """What the next start will do."""
    checkpoints = published_checkpoints(folder)
    return f"{same_command()} resumes from {checkpoints[-1].name}." if checkpoints else "Nothing was saved yet."


@dataclass(frozen=True)
class LivenessReport:
    """What the heartbeats of all processes show."""

    all: list[LastHeartbeat]
    gone: list[LastHeartbeat]
    """Gave no pulse."""
    failed: list[LastHeartbeat]
    """Ended with an error or an interruption of their own."""

    @property
    def first_left(self) -> int:
        """The rank that speaks for the rest."""
        lost = {sign.rank for sign in (*self.gone, *self.failed)}
        return min(set(range(world_size())) - lost, default=0)


@contextmanager
def lost_ranks_named(run: Run) -> Iterator[None]:
    """While it is open: a failed collective becomes an error that names the lost processes, also in events.jsonl and
    status.json.

    Raises:
        LaunchError: in place of the library's error.
        Interrupted: another process was stopped by a signal outside of the training.
    """
    try:
        yield
    except RuntimeError as problem:
        if not lost_others(problem):
            raise
        report = find_lost_ranks(run.folder)
        interrupted = [sign for sign in report.failed if str(sign.ended).startswith(Interrupted.__name__)]
        if interrupted:
            who = name_processes(interrupted, report.all)
            raise Interrupted(f"{who} was stopped by a signal. {resumes_from(run.folder)}") from problem
        message = f"{what_happened(report, problem)} {resumes_from(run.folder)}"
        if rank() == report.first_left:
            lost = [sign.rank for sign in (*report.gone, *report.failed)]
            record_event(
                run.folder, "lost", message, step=max((sign.step for sign in report.all), default=None), processes=lost
            )
            if rank() != 0:  # the main process cannot write it
                run.put_status("failed", error=LaunchError.__name__, message=message, exit_code=LaunchError.exit_code)
        raise LaunchError(message) from problem


def find_lost_ranks(folder: Path) -> LivenessReport:
    """Wait until each process gave a pulse, ended, or had the time for several pulses.

    For processes of this host the system is asked as well, which answers at once.
    """

    def others() -> list[LastHeartbeat]:
        return [sign for sign in read_heartbeats(folder) if sign.rank != rank() and sign.rank < world_size()]

    first = {sign.rank: sign.pulse for sign in others()}
    end = time.monotonic() + SECONDS_FOR_AN_ANSWER
    while True:
        signs = others()
        silent = [sign for sign in signs if sign.ended is None and sign.pulse == first.get(sign.rank)]
        dead = [sign for sign in silent if is_of_this_host(sign) and not is_alive(sign.pid)]
        if len(silent) == len(dead) or time.monotonic() > end:
            return LivenessReport(read_heartbeats(folder), silent, [sign for sign in signs if sign.ended])
        time.sleep(SECONDS_BETWEEN_LOOKS)


def what_happened(report: LivenessReport, problem: RuntimeError) -> str:
    if report.failed:
        ended = "; ".join(f"{name_processes([sign], report.all)} ended with {sign.ended}" for sign in report.failed)
        return f"{ended}. The others cannot continue without it."
    if report.gone:
        steps = ", ".join(sorted({str(sign.step) for sign in report.gone}))
        return f"{name_processes(report.gone, report.all)} is gone: its last heartbeat is of step {steps}."
    return (
        f"The processes lost each other, but all are there: {name_processes(report.all, report.all)}. The network"
        " between them broke, or one took longer than `training.ddp_timeout`."
        f" {type(problem).__name__}: {problem}."
    )
