"""How long a run is: the budget in optimizer steps and rows, for the processes that run now."""

import math
from dataclasses import dataclass
from pathlib import Path

from cpt.errors import RecipeError
from cpt.ranks import world_size
from cpt.recipe.schema import Recipe
from cpt.safety.out_of_memory import learned_micro_batch


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

    def steps_between(self, every_tokens: int | None, every_steps: int | None) -> int | None:
        """An interval of the recipe in optimizer steps; None where the recipe gives none."""
        return every_steps if every_tokens is None else max(1, round(every_tokens / self.tokens_per_step))


def run_length(recipe: Recipe, tokens_of_sources: int, folder: Path | None = None) -> RunLength:
    """The budget in optimizer steps, for the number of processes that run now.

    Args:
        tokens_of_sources: tokens of all sources once; one epoch.
        folder: of the run, which may have learned that the recipe's micro-batch does not fit.

    Raises:
        RecipeError: the global batch does not divide into micro-batches over the processes.
    """
    micro_batch = int(recipe.training.get("per_device_train_batch_size", 8))
    rows_at_once = micro_batch * world_size()
    if recipe.budget.global_batch_tokens is None:
        accumulation = int(recipe.training.get("gradient_accumulation_steps", 1))
    else:
        accumulation, rest = divmod(recipe.budget.global_batch_tokens, rows_at_once * recipe.data.sequence_length)
        if rest or not accumulation:
            raise RecipeError(
                f"`budget.global_batch_tokens` is {recipe.budget.global_batch_tokens:,}, which does not divide into "
                f"{world_size()} process(es) x per_device_train_batch_size {micro_batch} x sequence_length {recipe.data.sequence_length:,} "
                f"= {rows_at_once * recipe.data.sequence_length:,} tokens. Make it a multiple of that."
            )
    rows_per_step = rows_at_once * accumulation
    tokens_per_step = rows_per_step * recipe.data.sequence_length
    tokens = recipe.budget.tokens if recipe.budget.tokens is not None else (recipe.budget.epochs or 0) * tokens_of_sources
    steps = max(1, math.ceil(tokens / tokens_per_step))
    fits = learned_micro_batch(folder, world_size()) if folder is not None else None
    parts = micro_batch // fits if fits is not None and micro_batch % fits == 0 else 1
    return RunLength(steps, rows_per_step, accumulation * parts, tokens_per_step, micro_batch // parts)
