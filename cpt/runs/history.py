"""The history of a run's recipe: history.jsonl has a line for each change, with the recipe and the data until it.

A line: `step` (the last one with the old recipe), `row` (the first one with the new recipe), `changes` (key, kind,
before, after), `note`, `recipe` (until this step), `new_stretch` (whether the mixture changed), `positions` (rows read
of each source so far), `fingerprint` and `inputs` (of the data until this row), `from` (the checkpoint of another run
that this run began from), `replay` (written by `cpt reproduce`: free changes are repeated too).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cpt.files import write_atomic
from cpt.recipe.load import class_of_change
from cpt.recipe.schema import Recipe
from cpt.runs.folder import HISTORY, Content, read_lines

FREE_SECTIONS = [name for name, field in Recipe.model_fields.items() if "free" in field.metadata]


@dataclass(frozen=True)
class Part:
    """A part of a run with one recipe, until the step of the next change."""

    recipe: Recipe
    end: int | None = None
    """None: the end of the run."""
    stretches: list[Content] = field(default_factory=list)
    """The lines with which a stretch of the data ended before, each stretch with at least one row."""


def read_history(folder: Path) -> list[Content]:
    return read_lines(folder / HISTORY)


def write_history(folder: Path, lines: Sequence[Content]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomic(folder / HISTORY, text, durable=True, reuse_space=True)


def part_after(lines: Sequence[Content], step: int, now: Recipe) -> Part:
    """The part of the run after a step; `now` is the recipe after all changes.

    A run that resumes before a change repeats the steps up to it as they were. Keys that may change freely have the
    values of now, except where `cpt reproduce` repeats them.
    """
    ended = [line for line in lines if line["step"] <= step]
    stretches: list[Content] = []
    for line in ended:
        if line["new_stretch"] and line["row"] > (stretches[-1]["row"] if stretches else 0):
            stretches.append(line)
    for line in lines:
        if line["step"] <= step:
            continue
        before = Recipe.model_validate(line["recipe"])
        if line.get("replay"):
            return Part(before, line["step"], stretches)
        if any(change["kind"] != "free" for change in line["changes"]):
            return Part(with_free_keys(before, now), line["step"], stretches)
    return Part(now, None, stretches)


def with_free_keys(recipe: Recipe, now: Recipe) -> Recipe:
    """The recipe with the free sections, and the free keys of `training:`, of another one."""
    kept = {key: value for key, value in recipe.training.items() if not is_free(key)}
    training = kept | {key: value for key, value in now.training.items() if is_free(key)}
    return recipe.model_copy(
        update={name: getattr(now, name) for name in FREE_SECTIONS} | {"training": training}
    )


def is_free(key: str) -> bool:
    return class_of_change(f"training.{key}") == "free"
