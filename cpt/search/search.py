"""The loop of a search: ask for values, let trials run beside each other, tell how they ended."""

import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cpt.errors import Interrupted, RecipeError, TrainingError
from cpt.ranks import tell
from cpt.recipe.words import in_yaml
from cpt.search.signals import Signals
from cpt.search.study import PRUNED, TOKENS, Study
from cpt.search.trial import Ending, Trial

SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Draw:
    """What a trial is to try."""

    number: int
    values: dict[str, Any]
    slot: int
    """Which part of the machine it gets, from 0."""
    pruned: str = ""
    """Why an earlier search had decided to end it."""


@dataclass
class Search:
    """Runs the trials of a study.

    Args:
        start: starts a trial, or goes on with it.
        parallel: how many at once.
    """

    study: Study
    start: Callable[[Draw], Trial]
    parallel: int = 1
    ended: Callable[[], None] = lambda: None
    """Called when a trial is over."""
    running: dict[int, tuple[Any, Trial]] = field(default_factory=dict)
    """By slot: Optuna's trial and the run."""
    failures: list[str] = field(default_factory=list)
    """Errors of the trials that failed one after the other."""
    signals: Signals = field(default_factory=Signals)
    is_passed_on: bool = False

    def run(self) -> None:
        """All trials that are not over.

        Raises:
            Interrupted: it was told to stop, or a trial was.
            TrainingError: trials fail again and again in the same way.
        """
        waiting = deque(self.study.unfinished())
        stopped = ""
        with self.signals.noted():
            try:
                while not (stopped or self.signals.first) and self.fill(waiting) or self.running:
                    self.signals.wake.wait(SECONDS_BETWEEN_LOOKS)
                    stopped = self.look() or stopped
                    self.pass_on(stopped)
            finally:  # after an error here; else none is left
                for _, trial in self.running.values():
                    trial.stop(signal.SIGTERM)
        if self.signals.first:
            raise Interrupted(f"{signal.Signals(self.signals.first).name}: the trials under way have stopped.")
        if stopped:
            raise Interrupted(f"a trial was told to stop ({stopped}), and so the search stops too.")

    def fill(self, waiting: deque[Any]) -> bool:
        """Start trials where there is room; whether any is under way."""
        for slot in range(self.parallel):
            if slot in self.running or not waiting and len(self.study.trials) >= self.study.space.num_trials:
                continue
            trial = waiting.popleft() if waiting else self.study.ask()
            values = self.study.values_of(trial)
            told = ", ".join(f"{key} = {in_yaml(value)}" for key, value in values.items())
            tell(f"trial {trial.number} of {self.study.space.num_trials}: {told}")
            try:
                self.running[slot] = (
                    trial,
                    self.start(Draw(trial.number, values, slot, trial.user_attrs.get(PRUNED, ""))),
                )
            except RecipeError as problem:  # each value is right by itself, and together they are not
                self.end(trial, Ending("failed", reason=str(problem), is_of_values=True))
                return True
        return bool(self.running)

    def look(self) -> str:
        """At every trial once; why one of them stopped before its end, empty where none did."""
        stopped = ""
        for slot, (trial, run) in list(self.running.items()):
            points, ending = run.look()
            worse = [point for point in points if not self.study.report(trial, *point)]
            if ending is None:
                if worse and PRUNED not in trial.user_attrs and not self.signals.first:
                    tokens, value = worse[-1]
                    reason = (
                        f"trial {trial.number} is ended at {tokens:,} tokens: {value:.4g} is not among the better ones"
                    )
                    trial.set_user_attr(TOKENS, tokens)
                    trial.set_user_attr(PRUNED, reason)
                    run.prune(reason)
                continue
            del self.running[slot]
            if ending.state == "stopped":
                stopped = ending.reason or f"trial {trial.number}"
            else:
                self.end(trial, ending)
        return stopped

    def end(self, trial: Any, ending: Ending) -> None:
        """A trial's result.

        Raises:
            TrainingError: it failed as the ones before it.
        """
        self.study.end(trial, ending.state, ending.value, ending.reason)
        if ending.state != "pruned":  # which was told when it was decided
            tell(
                f"trial {trial.number} {ending.state}:"
                f" {ending.reason if ending.value is None else f'{ending.value:.6g}'}"
            )
        self.ended()
        if ending.state != "failed" or ending.is_of_values:
            self.failures.clear()
            return
        self.failures.append(ending.reason)
        most = self.study.space.settings.failures
        if len(self.failures) >= most and len({without_figures(reason) for reason in self.failures[-most:]}) == 1:
            raise TrainingError(
                f"{most} trials in a row failed with the same error, so the others would too: {ending.reason}"
            )

    def pass_on(self, stopped: str) -> None:
        """What the search was told, its trials are told, once; a second Ctrl-C ends them at once."""
        number = self.signals.first or (signal.SIGTERM if stopped else 0)
        for _, trial in self.running.values() if number else ():
            if self.signals.count > 1:
                trial.kill()
            elif not self.is_passed_on:
                trial.stop(number)
        self.is_passed_on = self.is_passed_on or bool(number)


def without_figures(reason: str) -> str:
    """The kind of an error: its first line without numbers, which differ from trial to trial."""
    return "".join(letter for letter in reason.partition("\n")[0] if not letter.isdigit())
