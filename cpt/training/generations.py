"""Generations of a stage that samples: their prompts, and the micro-batches that train on the answers."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

from torch.utils.data import Dataset

from cpt.data.rows.mixture import RowRange, shift_past_skipped
from cpt.errors import RecipeError
from cpt.recipe.huggingface_keys import find_stage
from cpt.recipe.keys import AUTO, DEFAULT_MICRO_BATCH, micro_batches_per_step
from cpt.recipe.schema import Recipe

Prompt = dict[str, Any]  # a data row: `prompt`, and the columns for rewards


@dataclass(frozen=True)
class Generations:
    """A generation: prompts that all processes sample at once, each `num_generations` times.

    Its completions are split into micro-batches and used `num_iterations` times. A generation spans several steps, or
    a step spans several generations; the ratio must be an integer, so that each step starts at the same point after a
    resume.
    """

    prompts: int  # per generation, over all processes
    micro_batches: int  # per process and generation
    accumulation: int  # micro-batches per process and step


def prompts_of_step(recipe: Recipe, completions: int) -> int:
    """Return the prompts per step; `completions` are those per step, over all processes."""
    return completions // (answers_of(recipe) * times_used(recipe))


def check_generations(recipe: Recipe, processes: int) -> None:
    """Refuse sizes of batches that do not hold whole groups of answers to a prompt, with sizes that do.

    Each step trains on whole groups, each generation samples whole groups, and one of the two lasts a whole number of
    times as long as the other.
    """
    training = recipe.training
    answers = answers_of(recipe)
    times = times_used(recipe)
    accumulation = micro_batches_per_step(recipe, processes)
    micro_batch = training.get("per_device_train_batch_size", DEFAULT_MICRO_BATCH)
    at_once = processes * (1 if micro_batch == AUTO else int(micro_batch))
    if answers < 2 and recipe.stage in ("grpo", "rloo"):
        raise RecipeError("`training.num_generations`: answers are compared: write at least 2.")
    completions = at_once * accumulation
    group = answers * times
    if completions % group:
        steps = next(n for n in count(accumulation) if at_once * n % group == 0)
        remedy = f"`training.gradient_accumulation_steps: {steps}`"
        if recipe.budget.global_batch_tokens is not None:
            tokens = at_once * steps * recipe.data.sequence_length
            remedy = f"`budget.global_batch_tokens: {tokens}`"
        dividing = [n for n in range(2, completions + 1) if completions % (n * times) == 0]
        if dividing:
            nearest = min(dividing, key=lambda number: abs(number - answers))
            remedy += f", or `training.num_generations: {nearest}`"
        raise RecipeError(
            f"`training.num_generations`: a step trains on {completions} completions, {at_once} at once x"
            f" {accumulation} micro-batches, not a multiple of"
            f" num_generations {answers} x num_iterations {times}. Write {remedy}."
        )
    if micro_batch != AUTO:
        check_length_of_generation(training, answers, times, at_once, accumulation)
    in_evaluation = training.get("per_device_eval_batch_size", micro_batch)
    answers = training.get("num_generations_eval") or answers
    has_sets = recipe.evaluation.held_out_share is not None or bool(recipe.evaluation.perplexity)
    if has_sets and in_evaluation != AUTO and processes * int(in_evaluation) % answers:
        rows = next(n for n in count(int(in_evaluation)) if processes * n % answers == 0)
        raise RecipeError(
            f"`training.per_device_eval_batch_size`: {in_evaluation} rows on {processes} process(es) are not whole"
            f" groups of {answers} answers to a prompt. Write `training.per_device_eval_batch_size: {rows}`."
        )


def check_length_of_generation(
    training: Mapping[str, Any], answers: int, times: int, at_once: int, accumulation: int
) -> None:
    size = training.get("generation_batch_size")
    lasts = training.get("steps_per_generation")
    if size is None and lasts is None:
        return
    if size is not None and lasts is not None:
        raise RecipeError(
            "`training.steps_per_generation` and `training.generation_batch_size` set the same thing. Remove one."
        )

    def fits(steps: int) -> bool:
        used = steps * times
        is_even = used % accumulation == 0 or accumulation % used == 0
        return is_even and at_once * steps % answers == 0

    steps, rest = divmod(int(size), at_once) if size is not None else (int(lasts or 1), 0)
    if not rest and steps and fits(steps):
        return
    fitting = next(number for number in count(max(steps, 1)) if fits(number))
    key = "steps_per_generation"
    value = fitting
    if size is not None:
        key = "generation_batch_size"
        value = fitting * at_once
    raise RecipeError(
        f"`training.{key}`: {training[key]}: a generation is whole groups of {answers} answers, {at_once} at once, and"
        f" lasts for whole steps of {accumulation} micro-batches, or divides one. Write `training.{key}: {value}`."
    )


def answers_of(recipe: Recipe) -> int:
    return of_config(recipe, "num_generations")


def times_used(recipe: Recipe) -> int:
    return of_config(recipe, "num_iterations")


def of_config(recipe: Recipe, key: str) -> int:
    """Return a number of `training:`, or the default of the stage's config."""
    defaults = {field.name: field.default for field in fields(find_stage(recipe.stage).CONFIG)}
    return int(recipe.training.get(key, defaults[key]))


class PromptRows(Dataset[list[Prompt]]):
    """One item per micro-batch and process: all prompts of its generation, the same on all processes.

    Only a generation's first micro-batch uses them. The others have them for runs that resume without completions.
    """

    def __init__(
        self, rows: Dataset[Prompt], plan: Generations, world_size: int, left_out: list[RowRange]
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.world_size = world_size
        self.left_out = left_out
        self.last: tuple[int, list[Prompt]] = (-1, [])

    def __getitem__(self, number: int) -> list[Prompt]:
        generation = number // self.world_size // self.plan.micro_batches
        if self.last[0] != generation:
            first = generation * self.plan.prompts
            numbers = []
            for row in range(first, first + self.plan.prompts):
                numbers.append(shift_past_skipped(row, self.left_out))
            self.last = generation, [self.rows[row] for row in numbers]
        return self.last[1]
