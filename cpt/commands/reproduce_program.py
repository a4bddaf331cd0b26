"""The repetition of a run: `reproduce_program.py RECIPE [--steps N]`, started by `cpt reproduce` through any launcher.

Its folder must not be first on the module search path, where its files could hide others.
"""

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cpt.command_line import run_command, show_log  # first: it keeps libraries quiet that the others import

# isort: split
import typer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils.logging import disable_progress_bar

from cpt.commands.train import check_and_train
from cpt.errors import Interrupted
from cpt.launch.processes import leave_processes
from cpt.recipe.load import load_recipe
from cpt.training.trainer import CPTTrainer


class EnoughSteps(Interrupted):
    """The requested steps are done."""


class EndAtLog(TrainerCallback):
    """Ends the run at the first log of a loss from a step on; it comes after the callbacks that write the log."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if "loss" in kwargs["logs"] and state.global_step >= self.step:
            raise EnoughSteps(f"ended after {state.global_step} steps, as requested")


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe of the repetition.")],
    steps: Annotated[int | None, typer.Option(help="End at the log of this step.", min=1)] = None,
    local_rank: Annotated[
        int | None, typer.Option("--local_rank", hidden=True, help="DeepSpeed's launcher passes it.")
    ] = None,
) -> None:
    show_log()
    disable_progress_bar()

    def ready(trainer: CPTTrainer) -> None:
        if steps is not None:
            trainer.add_callback(EndAtLog(steps))

    with suppress(EnoughSteps):
        check_and_train(load_recipe(recipe), ready=ready)
    leave_processes()


if __name__ == "__main__":
    run_command(command)
