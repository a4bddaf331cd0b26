"""How long a run is: the budget in optimizer steps and rows, for the processes that run now."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path

from cpt.data.prepared import PreparedData, steps_of_epochs
from cpt.errors import RecipeError
from cpt.parallelism import groups_of_rows
from cpt.ranks import is_main_process, world_size
from cpt.recipe.rules import REWARDED
from cpt.recipe.schema import Recipe
from cpt.training.find_stage import find_stage
from cpt.training.generations import prompts_of_step
from cpt.training.restart import learned_micro_batch

log = logging.getLogger("cpt")
MUCH_MORE = 1.1  # of a budget: what rounding up to whole steps may add without a word


@dataclass(frozen=True)
class RunLength:
    """How many steps of how many rows the budget makes."""

    steps: int
    rows_per_step: int
    gradient_accumulation_steps: int
    tokens_per_step: int
    micro_batch: int
    """Rows that one process takes at once: the recipe's, or what an earlier start learned to fit."""

    @property
    def rows(self) -> int:
        """Rows of the whole run."""
        return self.steps * self.rows_per_step

    @property
    def tokens(self) -> int:
        """Tokens of the whole run: the budget, rounded up to whole steps."""
        return self.steps * self.tokens_per_step

    def steps_between(self, every_tokens: int | None, every_steps: float | None) -> int | None:
        """The interval in optimizer steps; None if the recipe gives none."""
        if every_tokens is not None:
            return max(1, round(every_tokens / self.tokens_per_step))
        return (
            None
            if every_steps is None
            else int(every_steps)
            if every_steps >= 1
            else math.ceil(every_steps * self.steps)
        )


def length_of(recipe: Recipe, data: PreparedData, folder: Path) -> RunLength:
    """The run's length on its data.

    Raises:
        RecipeError: see `run_length`.
    """
    return run_length(recipe, data.num_rows, folder)


def tell_rounding(recipe: Recipe, length: RunLength) -> None:
    """A budget that whole steps go far beyond is told once."""
    budget = recipe.budget.tokens
    if budget is not None and length.tokens > MUCH_MORE * budget and is_main_process():
        log.warning(
            f"The run trains {length.tokens:,} tokens in {length.steps:,} step(s) of {length.tokens_per_step:,}, more"
            f" than `budget.tokens`: {budget:,}. Smaller steps come closer: `training.per_device_train_batch_size`,"
            " `budget.global_batch_tokens`."
        )


def run_length(recipe: Recipe, rows_of_sources: int, folder: Path | None = None) -> RunLength:
    """The budget in optimizer steps, for the number of processes that run now.

    Args:
        rows_of_sources: rows of one epoch. Padding counts, so that an epoch reads each row once.
        folder: of the run, which may have learned that the recipe's micro-batch does not fit.

    Raises:
        RecipeError: the global batch does not divide into micro-batches over the processes.
    """
    micro_batch = int(recipe.training.get("per_device_train_batch_size", 8))
    readers = groups_of_rows(recipe.training, world_size())  # processes, where none share rows
    rows_at_once = micro_batch * readers
    if recipe.budget.global_batch_tokens is None:
        accumulation = int(recipe.training.get("gradient_accumulation_steps", 1))
    else:
        accumulation, rest = divmod(recipe.budget.global_batch_tokens, rows_at_once * recipe.data.sequence_length)
        if rest or not accumulation:
            who = "process(es)" if readers == world_size() else "group(s) of processes"
            raise RecipeError(
                f"`budget.global_batch_tokens` is {recipe.budget.global_batch_tokens:,}, which does not divide into"
                f" {readers} {who} x per_device_train_batch_size {micro_batch} x sequence_length"
                f" {recipe.data.sequence_length:,} = {rows_at_once * recipe.data.sequence_length:,} tokens. Make it a"
                " multiple of that."
            )
    trained = rows_per_step = rows_at_once * accumulation
    if recipe.stage in REWARDED:  # a row is a prompt, which is answered several times
        rows_per_step = prompts_of_step(find_stage(recipe.stage).CONFIG, recipe.training, trained)
    tokens_per_step = trained * recipe.data.sequence_length
    if recipe.budget.tokens is None:
        steps = steps_of_epochs(recipe.data, recipe.budget.epochs or 0, rows_of_sources, rows_per_step)
    else:
        steps = math.ceil(recipe.budget.tokens / tokens_per_step)
    steps = max(1, steps)
    fits = learned_micro_batch(folder, world_size()) if folder is not None else None
    parts = micro_batch // fits if fits is not None and micro_batch % fits == 0 else 1
    return RunLength(steps, rows_per_step, accumulation * parts, tokens_per_step, micro_batch // parts)
