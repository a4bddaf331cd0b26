"""Which processes of a run are gone, asked by those that lost them: the error then names hosts instead of sockets."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpt.errors import LaunchError
from cpt.ranks import rank, world_size
from cpt.runs.events import record_event
from cpt.runs.folder import is_alive
from cpt.runs.record import Run
from cpt.runs.signs import Sign, is_of_this_host, name_processes, read_signs
from cpt.safety.lost_others import lost_others
from cpt.stages.checkpointing.saving_on_errors import goes_on_from

SECONDS_FOR_AN_ANSWER = 8.0  # four pulses
SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True)
class Roll:
    """Who answered.

    Attributes:
        all: every process that ever gave a sign in this start.
        gone: no sign of life while one waited for it.
        failed: ended with an error of their own.
    """

    all: list[Sign]
    gone: list[Sign]
    failed: list[Sign]

    @property
    def first_left(self) -> int:
        """The rank that speaks for the rest."""
        lost = {sign.rank for sign in (*self.gone, *self.failed)}
        return min(set(range(world_size())) - lost, default=0)


@contextmanager
def lost_processes_named(run: Run) -> Iterator[None]:
    """While it is open: a failed collective becomes an error that says which processes are gone, in events.jsonl and
    status.json as well.

    Raises:
        LaunchError: in place of the library's error.
    """
    try:
        yield
    except RuntimeError as problem:
        if not lost_others(problem):
            raise
        roll = call_the_roll(run.folder)
        message = f"{what_happened(roll, problem)} {goes_on_from(run.folder)}"
        if rank() == roll.first_left:
            lost = [sign.rank for sign in (*roll.gone, *roll.failed)]
            record_event(
                run.folder, "lost", message, step=max((sign.step for sign in roll.all), default=None), processes=lost
            )
            if rank() != 0:  # the main process cannot say how the run stands
                run.put_status("failed", error=LaunchError.__name__, message=message, exit_code=LaunchError.exit_code)
        raise LaunchError(message) from problem


def call_the_roll(folder: Path) -> Roll:
    """Wait until each process gave a sign of life, or had the time for several.

    Those of this host are asked for in the system as well: where a process died, the answer comes at once.
    """
    at_first = {sign.rank: sign.pulse for sign in others(folder)}
    end = time.monotonic() + SECONDS_FOR_AN_ANSWER
    while True:
        signs = others(folder)
        silent = [sign for sign in signs if sign.ended is None and sign.pulse == at_first.get(sign.rank)]
        dead = [sign for sign in silent if is_of_this_host(sign) and not is_alive(sign.pid)]
        if len(silent) == len(dead) or time.monotonic() > end:
            return Roll(read_signs(folder), silent, [sign for sign in signs if sign.ended])
        time.sleep(SECONDS_BETWEEN_LOOKS)


def others(folder: Path) -> list[Sign]:
    """What the other processes last said."""
    return [sign for sign in read_signs(folder) if sign.rank != rank() and sign.rank < world_size()]


def what_happened(roll: Roll, problem: RuntimeError) -> str:
    """One sentence; the library's own words where all processes are there."""
    if roll.failed:
        ended = "; ".join(f"{name_processes([sign], roll.all)} ended with {sign.ended}" for sign in roll.failed)
        return f"{ended}. The others cannot go on without it."
    if roll.gone:
        steps = ", ".join(sorted({str(sign.step) for sign in roll.gone}))
        who = name_processes(roll.gone, roll.all)
        return f"{who} is gone: there was no sign of life any more; the last was of step {steps}."
    return (
        f"The processes lost each other, while all of them are there: {name_processes(roll.all, roll.all)}. The"
        " network between them broke, or one took longer than `training.ddp_timeout` lets the others wait."
        f" {type(problem).__name__}: {problem}."
    )
