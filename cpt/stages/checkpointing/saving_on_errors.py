"""What an exception leaves behind: a checkpoint of the step that was done, or the name of the last one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.checkpoints.resume import published_checkpoints, step_of
from cpt.errors import CptError
from cpt.ranks import is_main_process, same_command, world_size
from cpt.runs.events import record_event
from cpt.safety.lost_others import lost_others
from cpt.stages.checkpointing.saving import TransactionalSaves


class StepBoundary(TrainerCallback):
    """Knows whether a step is half done: then weights and position do not belong together."""

    def __init__(self) -> None:
        self.is_within = False

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step's first micro-batch comes."""
        self.is_within = True

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Weights are updated and the step is counted."""
        self.is_within = False


@contextmanager
def saved_on_errors(trainer: TransactionalSaves) -> Iterator[None]:
    """While it is open: an exception between two steps saves what was trained; any other names the checkpoint that the
    run goes on from.

    With several processes nothing is saved: the others do not know that this one has failed, and wait for its part of
    the next step. A mistake that the user can mend (CptError) is expected, and passes. Which processes were lost is
    said by `lost_processes_named`.
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
            trainer.save_once("full")
            trainer.in_flight.wait()
        if is_main_process() and not lost_others(problem):
            record_event(folder, "failed", f"{what_failed(problem, step)} {goes_on_from(folder)}", step=step)
        raise


def what_failed(problem: Exception, step: int) -> str:
    """One sentence."""
    return f"The run failed after step {step}: {type(problem).__name__}: {problem}."


def goes_on_from(folder: Path) -> str:
    """What the next start will do."""
    checkpoints = published_checkpoints(folder)
    return f"{same_command()} goes on from {checkpoints[-1].name}." if checkpoints else "Nothing was saved yet."
