"""From the recipe's `rewards:` to what a trainer calls: options filled in, columns looked up, answers checked."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from cpt.errors import CptError, DataError, RecipeError, TrainingError
from cpt.extend import check_options, find
from cpt.recipe.huggingface_keys import STAGE_CONFIGS
from cpt.recipe.schema import Recipe, Reward
from cpt.recipe.sense import TAUGHT
from cpt.stages.find import find_stage
from cpt.stages.rewards.maths import maths_answer
from cpt.stages.rewards.models import load_judge, reward_model
from cpt.stages.rewards.texts import check_bounds, check_pattern, exact_match, length, matches_format

REWARDS: dict[str, Callable[..., Any]] = {
    "exact_match": exact_match,
    "maths_answer": maths_answer,
    "format": matches_format,
    "length": length,
    "reward_model": reward_model,
}
CHECKS: dict[str, Callable[..., None]] = {"format": check_pattern, "length": check_bounds}
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes beside the columns of the data."""
PROMPTS = ("prompt",)
MOST_LETTERS = 300  # of a prompt or a completion, in a message


class NamedReward:
    """A function of the recipe, ready to be called as TRL calls rewards: everything by name.

    Keyword-only parameters are options, which the recipe gives. All others are columns of the data; `**columns` takes
    every one.
    """

    def __init__(self, name: str, key: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.__name__, self.key, self.function, self.options = name, key, function, dict(options)

    @property
    def columns(self) -> list[str]:
        """Columns that it cannot do without: its parameters, and what its option `column` names."""
        parameters = inspect.signature(self.function).parameters
        by_position = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        needed = [p.name for p in by_position if p.default is p.empty and p.name not in GIVEN]
        named = self.options.get("column", parameters["column"].default if "column" in parameters else None)
        return [*needed, *([named] if isinstance(named, str) else [])]

    def refuse_missing(self, columns: Sequence[str]) -> None:
        """Raise where the rows lack a column that it reads."""
        missing = [column for column in self.columns if column not in columns]
        if missing:
            there = ", ".join(column for column in columns if column not in GIVEN) or "none"
            raise DataError(
                f"`{self.key}` ({self.__name__}) reads the column `{missing[0]}`. The data's rows have, beside the"
                f" prompt: {there}."
            )

    def __call__(self, **given: Any) -> list[float | None]:
        """The rewards of some completions; None where it does not apply.

        Raises:
            TrainingError: it failed, or gave something else; with the row.
        """
        self.refuse_missing(list(given))
        try:
            found = self.of(given)
        except CptError:
            raise
        except Exception as problem:  # of anybody's code
            row = self.failing_row(given)
            raise TrainingError(
                f"{self.told()} failed: {type(problem).__name__}: {problem}. {shown(given, row)}"
            ) from problem
        values = self.as_list(found, len(given["completions"]))
        for row, value in enumerate(values):
            if not (value is None or is_number(value)):
                text = (
                    f"{self.told()} gave {value!r}, where a finite number is needed (or None, where it does not"
                    " apply)."
                )
                raise TrainingError(f"{text} {shown(given, row)}")
        return [None if value is None else float(value) for value in values]

    def of(self, given: Mapping[str, Any]) -> Any:
        """What the function says, given what it takes."""
        parameters = inspect.signature(self.function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        options = {name for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        taken = {
            name: value for name, value in given.items() if name not in options and (takes_all or name in parameters)
        }
        return self.function(**taken, **self.options)

    def failing_row(self, given: Mapping[str, Any]) -> int:
        """The first row at which it fails by itself; the first of all, where it only fails with all of them."""
        size = len(given["completions"])
        for row in range(size):
            one = {
                name: [value[row]] if isinstance(value, list) and len(value) == size else value
                for name, value in given.items()
            }
            try:
                self.of(one)
            except Exception:  # the one that is looked for
                return row
        return 0

    def as_list(self, found: Any, count: int) -> list[Any]:
        """What it gave, one value for each completion."""
        if isinstance(found, torch.Tensor | np.ndarray):
            found = found.tolist()
        if not isinstance(found, list | tuple):
            raise TrainingError(
                f"{self.told()} gave {found!r}. A reward gives a list of numbers, one for each completion."
            )
        if len(found) != count:
            raise TrainingError(
                f"{self.told()} gave {len(found)} numbers for {count} completions. It has to give one for each."
            )
        return list(found)

    def told(self) -> str:
        """Its name and its place in the recipe."""
        return f"the reward {self.__name__} (`{self.key}`)"


def is_number(value: Any) -> bool:
    """Whether a value can be a reward."""
    return isinstance(value, bool | int | float | np.number | np.bool_) and math.isfinite(value)


def shown(given: Mapping[str, Any], row: int) -> str:
    """A row, for people."""
    prompt, said = (str(given[name][row])[:MOST_LETTERS] for name in ("prompts", "completions"))
    return f"Its prompt: {prompt!r}; the completion: {said!r}."


def build_rewards(rewards: Sequence[Reward], columns: Sequence[str]) -> list[NamedReward]:
    """The rewards that the recipe names, in order, each with a name of its own in the logs.

    Args:
        columns: that the data's rows have.

    Raises:
        RecipeError: an unknown name or option.
        DataError: a column is missing.
    """
    built: list[NamedReward] = []
    for number, (reward, function) in enumerate(zip(rewards, find_rewards(rewards), strict=True)):
        name = reward.name.rpartition(":")[2]
        same = sum(other.name.rpartition(":")[2] == name for other in rewards[:number])
        named = NamedReward(f"{name}_{same + 1}" if same else name, f"rewards[{number}]", function, reward.options)
        named.refuse_missing(columns)
        if function is reward_model:
            load_judge(**{key: value for key, value in reward.options.items() if key != "batch_size"})
        built.append(named)
    return built


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Refuse rewards that read what the data's rows do not have; nothing is loaded.

    Raises:
        DataError: with the columns that there are.
    """
    for number, (reward, function) in enumerate(zip(rewards, find_rewards(rewards), strict=True)):
        NamedReward(reward.name, f"rewards[{number}]", function, reward.options).refuse_missing(columns)


def check_rewards(recipe: Recipe) -> None:
    """Refuse rewards that there are not, and those that nobody reads.

    Raises:
        RecipeError: with what to write instead.
    """
    reads = tuple(find_stage(recipe.stage).COLUMNS) == PROMPTS and recipe.stage not in TAUGHT
    if recipe.rewards and not reads:
        raise RecipeError(
            f"`rewards` would have no effect: stage `{recipe.stage}` learns from what the data say. Remove them."
        )
    if not recipe.rewards and recipe.stage in STAGE_CONFIGS and reads:
        raise RecipeError(
            f"`rewards`: stage `{recipe.stage}` learns from them, and there are none. Write `rewards: [exact_match]`."
        )
    find_rewards(recipe.rewards)


def find_rewards(rewards: Sequence[Reward]) -> list[Callable[..., Any]]:
    """The functions that the recipe names, with their options checked against their signatures; nothing is loaded.

    Raises:
        RecipeError: an unknown name, or an option that is none or does not fit.
    """
    functions = []
    for number, reward in enumerate(rewards):
        key = f"rewards[{number}]"
        try:
            function = find("reward", reward.name, REWARDS)
        except RecipeError as problem:
            raise RecipeError(f"`{key}.name`: {problem}") from problem
        check_options(without_columns(function), reward.options, key)
        if inspect.iscoroutinefunction(function):
            raise RecipeError(
                f"`{key}`: {reward.name} is an async function. Write a plain `def`, with asyncio.run where it waits."
            )
        if reward.name in CHECKS:
            try:
                CHECKS[reward.name](**reward.options)
            except RecipeError as problem:
                raise RecipeError(f"`{key}`: {problem}") from problem
        functions.append(function)
    return functions


def without_columns(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one whose options can be checked: `**columns` takes none."""
    signature = inspect.signature(function)
    kept = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    bare = functools.update_wrapper(partial(function), function)
    bare.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return bare
