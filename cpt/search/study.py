"""The study: every trial's values, figures and end, kept in one SQLite file that a kill or a full disk does not spoil.

Optuna's journal file would do the same with less. But where a kill or a full disk leaves half a line in it, the next
line is written behind that half, and from then on the file cannot be read any more.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.errors import CheckpointError, ResourceError
from cpt.search.library import optuna
from cpt.search.pruners import build_pruner
from cpt.search.samplers import build_sampler
from cpt.search.space import Space

STUDY = "study.db"
NAME = "search"
PRUNED = "pruned"  # attribute of a trial: why it was ended, noted before its process is
TOKENS = "tokens"  # attribute of a trial: where that was
REASON = "reason"  # attribute of a trial: why it failed
AGAIN = "Make room or give the right to write; the same command goes on."
CELLS = 100  # of a trial's length in which values are compared with those of others


@dataclass(frozen=True)
class Study:
    """Asks Optuna for trials and tells it how they went."""

    space: Space
    optuna: Any
    cell_tokens: int
    """Values are reported in steps of so many tokens, so that trials with other batches meet at the same ones."""

    @property
    def trials(self) -> list[Any]:
        """All of them, as they stand."""
        found: list[Any] = self.optuna.get_trials(deepcopy=False)
        return found

    def unfinished(self) -> list[Any]:
        """The trials that were under way when an earlier search ended, to go on with."""
        state = optuna().trial.TrialState
        study = self.optuna
        return [
            optuna().trial.Trial(study, trial._trial_id)
            for trial in self.trials
            if trial.state in (state.RUNNING, state.WAITING)
        ]

    def ask(self) -> Any:
        """A new trial."""
        self.optuna.sampler = build_sampler(self.space, len(self.trials))
        return self.optuna.ask()

    def values_of(self, trial: Any) -> dict[str, Any]:
        """What it tries: drawn now, or as they were drawn before."""
        return {axis.key: axis.suggest(trial) for axis in self.space.axes}

    def report(self, trial: Any, tokens: int, value: float) -> bool:
        """Whether the trial may go on after this value; the first in each cell counts, what a resumed run repeats does
        not."""
        step = tokens // self.cell_tokens * self.cell_tokens
        if step in self.optuna._storage.get_trial(trial._trial_id).intermediate_values:
            return True
        trial.report(value, step)
        return not trial.should_prune()

    def end(self, trial: Any, state: str, value: float | None, reason: str) -> None:
        """Its last word.

        Args:
            state: complete, pruned or failed.
            value: of a complete one.
        """
        states = optuna().trial.TrialState
        if reason:
            trial.set_user_attr(REASON, reason)
        if state == "complete":
            self.optuna.tell(trial, value)
        else:
            self.optuna.tell(trial, state=states.PRUNED if state == "pruned" else states.FAIL)


def open_study(folder: Path, space: Space, total_tokens: int | None) -> Study:
    """The study of a search's folder, with the trials that were made already.

    Args:
        total_tokens: of a trial, None where it is not known.

    Raises:
        CheckpointError: the file is there and is none of a study.
    """
    path = folder / STUDY
    library = optuna()
    with storage_errors(path):
        try:
            storage = library.storages.RDBStorage(f"sqlite:///{path.absolute()}")
        except RuntimeError as problem:
            raise CheckpointError(
                f"{path} was written by another version of Optuna: {problem}. Start anew beside it: --new."
            ) from problem
        study = library.create_study(
            storage=storage,
            study_name=NAME,
            direction=space.settings.direction,
            pruner=build_pruner(space.settings, total_tokens),
            sampler=build_sampler(space, 0),
            load_if_exists=True,
        )
    return Study(space, study, max(1, (total_tokens or 0) // CELLS))


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Say what to do where the study's file, or what stands beside it, cannot be read or written.

    Raises:
        CheckpointError: it is damaged.
        ResourceError: the disk is full, or may not be written.
    """
    library = optuna()
    try:
        yield
    except (library.exceptions.StorageInternalError, OSError) as problem:
        raise told(path, problem) from problem
    except Exception as problem:  # SQLAlchemy's own, which Optuna lets through while it opens the file
        if not type(problem).__module__.startswith("sqlalchemy."):
            raise
        raise told(path, problem) from problem


def told(path: Path, problem: BaseException) -> CheckpointError | ResourceError:
    """An error of the disk or of the database in words."""
    if isinstance(problem, OSError):
        return ResourceError(f"{problem.filename or path.parent} cannot be written: {problem.strerror}. {AGAIN}")
    causes = [problem]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    said = str(causes[-1]).splitlines()[0]
    if any(word in said for word in ("malformed", "not a database", "corrupt")):
        return CheckpointError(
            f"{path} is damaged ({said}). The trials' own records are whole; start the search anew with --new."
        )
    return ResourceError(f"{path} cannot be written: {said}. {AGAIN}")
