"""How prompts are shared out: which ones a generation answers, and which micro-batches train on them, by arithmetic
alone."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch.utils.data import Dataset

from cpt.data.rows.mixture import RowRange, shift_past_skipped
from cpt.errors import RecipeError

Prompt = dict[str, Any]  # a row of the data: `prompt`, and the columns that rewards read


@dataclass(frozen=True)
class Generations:
    """A generation is what all processes sample at once: some prompts, each of them `num_generations` times.

    Its completions are cut into micro-batches, and gone through `num_iterations` times. So it lasts for several steps,
    or a step takes in several of them; both are whole numbers, so that each step begins where it would have begun
    without an interruption.
    """

    prompts: int  # of one generation, of all processes
    micro_batches: int  # of each process, which train on one generation
    accumulation: int  # micro-batches of each process in a step

    def check(self) -> None:
        lasts, steps = self.micro_batches, self.accumulation
        if lasts % steps and steps % lasts:
            where = f"steps_per_generation x num_iterations ({lasts}) or gradient_accumulation_steps ({steps})"
            raise RecipeError(f"`training`: let one of {where} be a multiple of the other.")


def prompts_of_step(config: type, training: Mapping[str, Any], completions: int) -> int:
    """Prompts of a step, from the recipe alone; a RecipeError where the number is not whole.

    Args:
        config: the stage's config class, for its defaults.
        completions: that all processes train on in a step.
    """
    defaults = {field.name: field.default for field in fields(config)}
    answers, times = (int(training.get(key, defaults[key])) for key in ("num_generations", "num_iterations"))
    prompts, rest = divmod(completions, answers * times)
    if rest:
        raise RecipeError(
            f"`training`: a step trains on {completions} completions. Let per_device_train_batch_size x"
            f" gradient_accumulation_steps x processes be a multiple of {answers * times}: num_generations {answers} x"
            f" num_iterations {times}."
        )
    return prompts


class PromptRows(Dataset[list[Prompt]]):
    """One item for each micro-batch of each process: all prompts of its generation, the same on all processes.

    Only a generation's first micro-batch uses them. The others get them for a run that resumes without completions.
    """

    def __init__(self, rows: Dataset[Prompt], plan: Generations, world_size: int, left_out: list[RowRange]) -> None:
        self.rows, self.plan, self.world_size, self.left_out = rows, plan, world_size, left_out
        self.last: tuple[int, list[Prompt]] = (-1, [])

    def __getitem__(self, number: int) -> list[Prompt]:
        generation = number // self.world_size // self.plan.micro_batches
        if self.last[0] != generation:
            first = generation * self.plan.prompts
            numbers = [shift_past_skipped(row, self.left_out) for row in range(first, first + self.plan.prompts)]
            self.last = generation, [self.rows[row] for row in numbers]
        return self.last[1]
