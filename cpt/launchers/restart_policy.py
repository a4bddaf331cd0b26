"""Whether a run that ended before its time is started again, judged by how all its attempts ended."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cpt.errors import CptError, Interrupted, LaunchError, RestartNeeded

SAME_STEP_LIMIT = 3
MOST_FOR_ONE_REASON = 3  # restarts that the run itself asked for, with the same message
SECONDS_OF_BUDGET = 3600.0


@dataclass(frozen=True)
class Ended:
    """How one attempt ended."""

    code: int
    """Of the process that was started; launchers change it."""
    state: str
    """Of status.json: running, where the process had no time to say how it ended."""
    error: str | None
    own_code: int | None
    """The exit code that the run itself wrote down."""
    message: str
    step: int
    """The last one that any process told of."""
    hung: bool
    at: float
    """Seconds, of a clock that only goes on."""


@dataclass(frozen=True)
class Decision:
    """What comes next."""

    what: Literal["done", "again", "give up", "stop"]
    why: str = ""
    code: int = 0


def next_move(endings: Sequence[Ended], *, restarts: int | None, resumes: bool = True) -> Decision:
    """Whether to start again, judged by all attempts so far.

    Args:
        restarts: allowed in one hour; None where nothing but the run itself may ask for another start.
        resumes: False where the recipe says `safety.on_error: abort`.
    """
    last = endings[-1]
    if last.state == "finished":
        return Decision("done")
    if last.error == RestartNeeded.__name__:
        repeated = [ending.message for ending in endings[-MOST_FOR_ONE_REASON - 1 :]].count(last.message)
        if repeated > MOST_FOR_ONE_REASON:
            return Decision(
                "give up", f"{last.message} It was restarted {repeated - 1} times for it", RestartNeeded.exit_code
            )
        return Decision("again", last.message)
    if last.state == "interrupted":
        return Decision("stop", last.message, Interrupted.exit_code)
    if last.own_code == CptError.exit_code and last.error != LaunchError.__name__:
        return Decision("give up", last.message, CptError.exit_code)
    how = "stood still" if last.hung else f"ended with code {last.code}"
    cause = ": ".join(filter(None, (last.error, last.message)))
    why = f"the run {how} after step {last.step}" + (f" ({cause})" if cause else "")
    if restarts is None:
        remedy = "`cpt train --supervise` restarts a run automatically from its newest checkpoint"
        return Decision("give up", f"{why}. {remedy}", last.own_code or 1)
    if not resumes:
        return Decision("give up", f"{why}; `safety.on_error: abort` starts nothing again", last.own_code or 1)
    failures = [ending for ending in endings if ending.error != RestartNeeded.__name__]
    if Counter(ending.step for ending in failures)[last.step] >= SAME_STEP_LIMIT:
        return Decision(
            "give up",
            f"{why}, as {SAME_STEP_LIMIT - 1} attempts before it: starting again does not help",
            last.own_code or 1,
        )
    recent = sum(last.at - ending.at < SECONDS_OF_BUDGET for ending in failures)
    if recent > restarts:
        return Decision(
            "give up", f"{why}, and {restarts} restarts in an hour are what it was allowed", last.own_code or 1
        )
    return Decision("again", why)
