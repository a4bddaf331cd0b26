"""One part of a rehearsal, started by any launcher: `part.py PART RECIPE REPORTS`; `cpt rehearse` starts them one
after the other.

Its folder must not be first on the path that modules are looked for on: see `starting.py`.
"""

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from cpt.command_line import run_command, show_log
from cpt.errors import CptError
from cpt.evaluation.after_training import evaluate_after_training
from cpt.evaluation.samples import PromptSamples
from cpt.launchers.processes import leave_processes
from cpt.ranks import is_main_process
from cpt.recipe.load import load_recipe
from cpt.rehearsal.full_examples import longest_examples
from cpt.rehearsal.held_out import shortened_set
from cpt.rehearsal.watching import HELD_OUT, LEFT_OUT, LENGTH, Measuring, failures_noted
from cpt.runs.record import Run, write_json
from cpt.stages.trainer import CPTTrainer
from cpt.train import train

LONGEST_ROWS_STEPS = 3  # the first makes the optimizer's states; after it each kind of full rows has its turn
SAVED_STEP, LAST_STEP = 2, 4


class EnoughRehearsed(CptError):  # noqa: N818 - it is no error of anybody
    """Nothing more is to be learned from this part."""


class EndsAfter(TrainerCallback):
    """Leaves the run after a step, without what follows the last step of a run."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """After the update."""
        if state.global_step >= min(self.step, state.max_steps):
            raise EnoughRehearsed(f"{state.global_step} steps")


class SavesAndStops(TrainerCallback):
    """Evaluates and saves after one step, and ends the training after another as if the run were through."""

    def __init__(self, *, evaluates: bool) -> None:
        self.evaluates = evaluates

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """After the update."""
        if state.global_step == min(SAVED_STEP, max(1, state.max_steps - 1)):
            control.should_save, control.should_evaluate = True, self.evaluates
        elif state.global_step >= LAST_STEP:
            control.should_training_stop = True


def longest_rows(trainer: CPTTrainer, reports: Path) -> None:
    """Full rows only; nothing but steps."""
    arguments = trainer.args
    rows_at_once = arguments.per_device_train_batch_size * arguments.world_size // trainer.sharing_rows
    trainer.rows = longest_examples(trainer, rows_at_once)
    arguments.eval_on_start = False
    trainer.remove_callback(PromptSamples)
    trainer.add_callback(EndsAfter(LONGEST_ROWS_STEPS))


def first_steps(trainer: CPTTrainer, reports: Path, *, evaluates: bool = True) -> None:
    """The run's own first steps, with a save in their middle and all that comes when a run ends."""
    sets, batch = trainer.held_out, trainer.args.per_device_eval_batch_size * trainer.args.world_size
    trainer.held_out = {
        name: shortened_set(held_out, trainer.recipe.data.packing, batch) for name, held_out in sets.items()
    }
    if is_main_process():
        counts = {name: [trainer.held_out[name].num_documents, of_set.num_documents] for name, of_set in sets.items()}
        write_json(reports / HELD_OUT, counts)
    if not evaluates:
        trainer.args.eval_on_start = False
        trainer.remove_callback(PromptSamples)
    trainer.add_callback(SavesAndStops(evaluates=evaluates and bool(sets)))


PARTS: dict[str, Callable[[CPTTrainer, Path], None]] = {
    "longest_rows": longest_rows,
    "first_steps": first_steps,
    "first_steps_unjudged": partial(first_steps, evaluates=False),
    "resumed": partial(first_steps, evaluates=False),
}
TASKS = "tasks"


def command(
    part: Annotated[str, typer.Argument(help=f"One of {', '.join([*PARTS, TASKS])}.")],
    recipe: Annotated[Path, typer.Argument(help="The recipe as it is rehearsed.")],
    reports: Annotated[Path, typer.Argument(help="Folder for what the part tells of itself.")],
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", hidden=True, help="DeepSpeed's launcher passes it.")
    ] = None,
) -> None:
    """Run one part."""
    show_log()
    disable_progress_bar()
    with failures_noted(reports):
        rehearsed = load_recipe(recipe)
        if part == TASKS:
            folder = Run(rehearsed.output_dir / rehearsed.name).export_folder
            _, left_out = evaluate_after_training(folder, rehearsed)
            write_json(reports / LEFT_OUT, [f"{one.what}: {one.why}" for one in left_out])
            return
        with suppress(EnoughRehearsed):
            train(rehearsed, ready=partial(prepare, part, reports))
    leave_processes()


def prepare(part: str, reports: Path, trainer: CPTTrainer) -> None:
    """Who watches it, and what the part changes."""
    if is_main_process():
        write_json(reports / LENGTH, dataclasses.asdict(trainer.length))
    trainer.add_callback(Measuring(reports))
    PARTS[part](trainer, reports)


if __name__ == "__main__":
    run_command(command)
