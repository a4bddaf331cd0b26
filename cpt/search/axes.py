"""One key of the recipe and what a search may try there: a range of numbers, or a list of values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpt.extend import did_you_mean
from cpt.recipe.overrides import steps_of
from cpt.recipe.sections import annotation_at
from cpt.recipe.shape import kinds_of
from cpt.recipe.tree import Mistakes, Node, Place, dotted, plain
from cpt.recipe.words import in_words, in_yaml
from cpt.recipe.written_numbers import whole_number

OF_A_RANGE = ("low", "high", "log", "step")
DIGITS = 6  # of a number that was drawn: enough for any key, and few enough to be read
NEAR = 1e-9  # of a step, by which a sum of floats may miss a multiple


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Args:
        log: draw evenly between the numbers' logarithms: as often between 1e-6 and 1e-5 as between 1e-5 and 1e-4.
        step: from one number to the next; None where any between will do.
        is_whole: the numbers are whole.
    """

    key: str
    place: Place
    low: float
    high: float
    log: bool = False
    step: float | None = None
    is_whole: bool = False

    @property
    def ends(self) -> list[Any]:
        """The values that are tried on the gates: where both pass, those between do."""
        return [self.low, self.high]

    @property
    def grid(self) -> list[Any] | None:
        """All of them as Optuna sees them, None where there is no end of them."""
        if self.step is None:
            return list(range(int(self.low), int(self.high) + 1)) if self.is_whole and not self.log else None
        count = round((self.high - self.low) / self.step) + 1
        numbers = [self.low + index * self.step for index in range(count)]
        return [int(number) for number in numbers] if self.is_whole else numbers

    def suggest(self, trial: Any) -> Any:
        """Draw one for this trial, or give what it drew before."""
        if self.is_whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=int(self.step or 1), log=self.log)
        return self.value_of(trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log))

    def value_of(self, drawn: Any) -> Any:
        """What the recipe says where Optuna drew this."""
        return drawn if self.is_whole else min(self.high, max(self.low, float(f"{drawn:.{DIGITS}g}")))

    def described(self) -> dict[str, Any]:
        """As the search's record keeps it."""
        return {"low": self.low, "high": self.high, "log": self.log, "step": self.step}


@dataclass(frozen=True)
class Choice:
    """One of these values: words, numbers, or whole sections."""

    key: str
    place: Place
    values: tuple[Any, ...]

    @property
    def ends(self) -> list[Any]:
        """The values that are tried on the gates: all."""
        return list(self.values)

    @property
    def labels(self) -> dict[str, Any]:
        """Each value by how it is written: Optuna knows no sections."""
        return {in_yaml(value): value for value in self.values}

    @property
    def grid(self) -> list[Any] | None:
        """All of them as Optuna sees them."""
        return list(self.labels)

    def suggest(self, trial: Any) -> Any:
        """Draw one for this trial, or give what it drew before."""
        return self.value_of(trial.suggest_categorical(self.key, list(self.labels)))

    def value_of(self, drawn: Any) -> Any:
        """What the recipe says where Optuna drew this."""
        return self.labels[drawn]

    def described(self) -> list[str]:
        """As the search's record keeps it."""
        return list(self.labels)


Axis = Range | Choice


def read_axis(written: str, node: Node, mistakes: Mistakes) -> Axis | None:
    """What stands behind a key of the space; None where that is a mistake, which is noted.

    Args:
        written: the key, `data.sources[0].weight`.
    """
    key = dotted(int(step) if step.isdigit() else step for step in steps_of(written))
    if isinstance(node.value, list):
        return read_choice(key, node, mistakes)
    if isinstance(node.value, dict) and {"low", "high"} & node.value.keys():
        return read_range(key, node, mistakes)
    keys = list(node.value) if isinstance(node.value, dict) else []
    if keys and (near := [name for name in keys if did_you_mean(name, OF_A_RANGE)]):
        mistakes.add(node.place, f"`{key}`: a range has `low` and `high`.{did_you_mean(near[0], OF_A_RANGE)}")
    elif keys:
        mistakes.add(node.place, f"`{key}` is a section: write the keys below it with dots, `{key}.{keys[0]}: ...`")
    else:
        text = (
            f"`{key}`: expected `{{low: 1e-6, high: 1e-3, log: true}}` or a list of values, got"
            f" {in_words(plain(node))}"
        )
        mistakes.add(node.place, text)
    return None


def read_choice(key: str, node: Node, mistakes: Mistakes) -> Choice | None:
    """A list of at least two different values."""
    axis = Choice(key, node.place, tuple(plain(node)))
    if len(axis.labels) < 2 or len(axis.labels) < len(axis.values):
        told = "a value stands there twice" if len(axis.labels) < len(axis.values) else "there is nothing to choose"
        mistakes.add(node.place, f"`{key}`: {told}. Give at least two different values, or write it into the recipe")
        return None
    return axis


def read_range(key: str, node: Node, mistakes: Mistakes) -> Range | None:
    """Numbers with bounds that can be."""
    entries: dict[str, Node] = node.value
    for name, child in entries.items():
        if name not in OF_A_RANGE:
            text = (
                f"`{key}.{name}` is nothing that a range has.{did_you_mean(name, OF_A_RANGE)} It has:"
                f" {', '.join(OF_A_RANGE)}"
            )
            mistakes.add(child.place, text)
            return None
    found: dict[str, Any] = {name: whole_number(entries[name].value) for name in OF_A_RANGE if name in entries}
    if wrong := wrong_bounds(found):
        mistakes.add(node.place, f"`{key}`: {wrong}")
        return None
    kinds = kinds_of(annotation_at(tuple(int(step) if step.isdigit() else step for step in steps_of(key))))
    numbers = [number for name, number in found.items() if name != "log"]
    is_whole = (
        kinds == ["int"]
        or kinds != ["float"]
        and all(isinstance(entries[name].value, int) for name in found if name != "log")
    )
    if is_whole and not all(isinstance(number, int) for number in numbers):
        mistakes.add(node.place, f"`{key}` holds whole numbers: give whole bounds and a whole `step`")
        return None
    convert = int if is_whole else float
    step = convert(found["step"]) if "step" in found else None
    return Range(
        key, node.place, convert(found["low"]), convert(found["high"]), found.get("log", False), step, is_whole
    )


def wrong_bounds(found: Mapping[str, Any]) -> str | None:
    """Why nothing can be drawn from there, or None."""
    if missing := [name for name in ("low", "high") if name not in found]:
        return f"`{missing[0]}` is missing"
    for name, value in found.items():
        if name == "log":
            if not isinstance(value, bool):
                return f"`log` is true or false, got {in_words(value)}"
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"`{name}` is a number, got {in_words(value)}"
    low, high = found["low"], found["high"]
    if low >= high:
        return f"`low` ({in_yaml(low)}) must be below `high` ({in_yaml(high)})"
    if found.get("log") and low <= 0:
        return f"`log: true` needs a `low` above 0, got {in_yaml(low)}: there is no logarithm of it"
    return wrong_step(low, high, found["step"], bool(found.get("log"))) if "step" in found else None


def wrong_step(low: float, high: float, step: float, log: bool) -> str | None:
    """Why the numbers cannot be counted from one end to the other, or None."""
    if log:
        return "`step` and `log: true` exclude each other: give a list of values for steps that grow"
    if step <= 0:
        return f"`step` must be more than 0, got {in_yaml(step)}"
    steps = (high - low) / step
    if abs(steps - round(steps)) > NEAR * max(1.0, steps):
        return (
            f"`high` is not reached from `low` in steps of {in_yaml(step)}: the last one is"
            f" {in_yaml(low + int(steps) * step)}"
        )
    return None
