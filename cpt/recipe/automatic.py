"""The keys of `training:` that may say `auto`: the planner then chooses, for the machine that the run is on."""

from collections.abc import Mapping
from typing import Any

from cpt.errors import RecipeError
from cpt.recipe.schema import Recipe

AUTO = "auto"
MICRO_BATCH = "per_device_train_batch_size"
ACCUMULATION = "gradient_accumulation_steps"
CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
LOADING = ("dataloader_num_workers", "dataloader_prefetch_factor")
COMPILING = "torch_compile"
DEFAULT_MICRO_BATCH = 8  # of TrainingArguments
AUTOMATIC = (MICRO_BATCH, ACCUMULATION, *CHECKPOINTING, *LOADING, COMPILING)


def automatic_keys(training: Mapping[str, Any]) -> list[str]:
    """Those that say it."""
    return [key for key in AUTOMATIC if training.get(key) == AUTO]


def refuse_automatic(recipe: Recipe) -> Recipe:
    """The recipe, if no key of it says `auto`.

    Raises:
        RecipeError: a key does.
    """
    if keys := automatic_keys(recipe.training):
        names = ", ".join(f"`training.{key}`" for key in keys)
        raise RecipeError(f"{names}: auto. Write a value, use `cpt train`, or call `resolve_recipe(recipe)` first.")
    return recipe


def accumulation(recipe: Recipe) -> int:
    """Micro-batches in a step of one process; 1 where the recipe leaves that open."""
    rows, steps = (
        recipe.training.get(key, default) for key, default in ((MICRO_BATCH, DEFAULT_MICRO_BATCH), (ACCUMULATION, 1))
    )
    if not isinstance(rows, int) or not isinstance(steps, int):
        return 1
    if recipe.budget.global_batch_tokens is None:
        return steps
    return max(1, recipe.budget.global_batch_tokens // (rows * recipe.data.sequence_length))
