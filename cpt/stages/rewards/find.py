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
from cpt.plugins import check_options, find
from cpt.recipe.schema import Reward
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
MOST_LETTERS = 300  # of a prompt or a completion, in a message


class NamedReward:
    """A function of the recipe, ready to be called as TRL calls rewards: everything by name.

    Keyword-only parameters are options, which the recipe gives. All others are columns of the data; `**columns` takes
    every one.
    """

    def __init__(self, name: str, key: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.__name__, self.function, self.options = name, function, dict(options)
        self.where = f"the reward {name} (`{key}`)"
        self.parameters = inspect.signature(function).parameters

    @property
    def columns(self) -> list[str]:
        """Columns that it needs: its parameters, and what its option `column` names."""
        by_position = [p for p in self.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        needed = [p.name for p in by_position if p.default is p.empty and p.name not in GIVEN]
        default = self.parameters["column"].default if "column" in self.parameters else None
        named = self.options.get("column", default)
        return [*needed, *([named] if isinstance(named, str) else [])]

    def refuse_missing(self, columns: Sequence[str]) -> None:
        """Raise where the rows lack a column that it reads."""
        missing = [column for column in self.columns if column not in columns]
        if missing:
            there = ", ".join(column for column in columns if column not in GIVEN) or "none"
            raise DataError(f"{self.where} reads the column `{missing[0]}`. Beside the prompt the rows have: {there}.")

    def __call__(self, **given: Any) -> list[float | None]:
        """The rewards of some completions; None where it does not apply.

        Raises:
            TrainingError: it failed, or did not return one finite number or None for each completion.
        """
        self.refuse_missing(list(given))
        takes_all = any(p.kind is p.VAR_KEYWORD for p in self.parameters.values())
        options = {name for name, p in self.parameters.items() if p.kind is p.KEYWORD_ONLY}
        taken = {
            name: value
            for name, value in given.items()
            if name not in options and (takes_all or name in self.parameters)
        }
        try:
            found = self.function(**taken, **self.options)
        except CptError:
            raise
        except Exception as problem:
            raise TrainingError(f"{self.where} failed: {type(problem).__name__}: {problem}.") from problem
        values = found.tolist() if isinstance(found, torch.Tensor | np.ndarray) else found
        count = len(given["completions"])
        if not isinstance(values, list | tuple) or len(values) != count:
            raise TrainingError(f"{self.where} returned {found!r}: expected a list of {count} numbers.")
        for row, value in enumerate(values):
            if not (value is None or is_number(value)):
                prompt, said = (str(given[name][row])[:MOST_LETTERS] for name in ("prompts", "completions"))
                raise TrainingError(
                    f"{self.where} returned {value!r}: expected a finite number, or None where it does not apply. The"
                    f" prompt: {prompt!r}; the completion: {said!r}."
                )
        return [None if value is None else float(value) for value in values]


def is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float | np.number | np.bool_) and math.isfinite(value)


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
