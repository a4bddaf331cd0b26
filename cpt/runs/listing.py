"""The runs below a folder, each with what one asks of it first; found by name, filtered and sorted."""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cpt.errors import CheckpointError, RecipeError
from cpt.extend import closest, did_you_mean
from cpt.recipe.run_results import EXPORT, RECIPE, STATUS
from cpt.runs.folder import (
    BITS_PER_BYTE,
    ENVIRONMENT,
    EVALUATED,
    INPUTS,
    METRICS,
    last_figures,
    read_object,
    read_recipe,
    read_status,
)

OF_A_RUN = (RECIPE, STATUS, METRICS, ENVIRONMENT, INPUTS)
NOT_ENTERED = ("checkpoint-*", EXPORT, "held_out", "heartbeats", ".*", "__pycache__")
COLUMNS = (
    "name",
    "stage",
    "state",
    "step",
    "steps",
    "tokens",
    "loss",
    "bits_per_byte",
    "tokens_per_second",
    "age",
    "tags",
)
CONDITION = re.compile(r"\s*([\w/.:-]+?)\s*(<=|>=|!=|=|<|>|~)\s*(.*?)\s*", re.DOTALL)
COMPARED: dict[str, Callable[[float, float], bool]] = {
    "<": lambda value, bound: value < bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    ">=": lambda value, bound: value >= bound,
}


@dataclass(frozen=True)
class ListedRun:
    """A run in the list."""

    folder: Path
    values: dict[str, Any]
    """By COLUMNS, and by `eval_<set>_bits_per_byte`: text, number, a list of tags, or None where it is not known. Age
    in seconds."""


def list_runs(folder: Path, conditions: Sequence[str] = (), order: str | None = None) -> list[ListedRun]:
    """All runs below a folder, the newest first.

    Args:
        conditions: that each of them fulfils: `state=finished`, `tag=x`, `loss<2.5`, `name~pattern`.
        order: a column, the smallest first; with `-` before it the largest. Runs that lack it come last.

    Raises:
        CheckpointError: there is no such folder.
        RecipeError: a column or a condition does not exist.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is no folder. Name the one that holds the runs (`output_dir` of their recipes): cpt runs FOLDER"
        )
    runs = sorted((listed(run, folder) for run in runs_below(folder)), key=lambda run: run.values["age"])
    known = list(dict.fromkeys([*COLUMNS, *(name for run in runs for name in run.values)]))
    for condition in conditions:
        fits = condition_of(condition, known)
        runs = [run for run in runs if fits(run)]
    return ordered(runs, order, known) if order else runs


def runs_below(folder: Path) -> Iterator[Path]:
    """The folders of runs, the given one too; what lies inside checkpoints and exported models is not looked at."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not any(fnmatchcase(name, pattern) for pattern in NOT_ENTERED))
        if sum(name in files for name in OF_A_RUN) > 1:
            yield Path(here)


def listed(run: Path, folder: Path) -> ListedRun:
    recipe, status, figures = read_recipe(run / RECIPE, []), read_status(run), last_figures(run)
    name = str(run.relative_to(folder)) if run != folder else run.name
    evaluated = {key: value for key, value in figures.items() if key.startswith(EVALUATED)}
    tags = recipe.get("tags")
    steps = status.get("steps")
    state = status.get("state")
    values = {
        "name": name,
        "stage": recipe["stage"] if isinstance(recipe.get("stage"), str) else None,
        "state": state if isinstance(state, str) else "not started" if not figures else "unknown",
        "step": whole(figures.get("step")),
        "steps": steps if isinstance(steps, int) else None,
        "tokens": whole(figures.get("tokens")),
        "loss": figures.get("loss"),
        "bits_per_byte": sum(evaluated.values()) / len(evaluated) if evaluated else None,
        "tokens_per_second": figures.get("tokens_per_second"),
        "age": age_of(run),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
    }
    return ListedRun(run, values | evaluated)


def whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def age_of(run: Path) -> float:
    """Seconds since it was started first."""
    started = read_object(run / ENVIRONMENT, []).get("started")
    try:
        return time.time() - datetime.fromisoformat(str(started)).timestamp()
    except (ValueError, OverflowError):
        return time.time() - run.stat().st_mtime


def condition_of(text: str, known: Sequence[str]) -> Callable[[ListedRun], bool]:
    """What a run has to fulfil.

    Raises:
        RecipeError: it is written otherwise than `column operator value`, or compares what cannot be compared.
    """
    match = CONDITION.fullmatch(text)
    if not match:
        raise RecipeError(
            f"--where {text!r}: write column, sign and value: state=finished, state!=died, tag=x, loss<2.5, name~demo*"
        )
    column, sign, value = match.groups()
    column = checked_column("tags" if column == "tag" else column, known, "--where")
    if sign in ("=", "!="):
        return lambda run: is_equal(run.values.get(column), value) == (sign == "=")
    if sign == "~":
        return lambda run: any(is_like(one, value) for one in texts_of(run.values.get(column)))
    try:
        bound = float(value.replace("_", ""))
    except ValueError as problem:
        raise RecipeError(
            f"--where {text!r}: {sign} compares numbers, and `{value}` is none. For texts: = != ~"
        ) from problem

    def is_beyond(run: ListedRun) -> bool:
        number = run.values.get(column)
        return isinstance(number, int | float) and COMPARED[sign](number, bound)

    return is_beyond


def checked_column(column: str, known: Sequence[str], option: str) -> str:
    """The column, as far as there is one.

    Raises:
        RecipeError: there is not.
    """
    if column not in known:
        shown = [name for name in known if name in COLUMNS or name.endswith(BITS_PER_BYTE)]
        hint = did_you_mean(column, known) or f" There are: {', '.join(shown)}."
        raise RecipeError(f"{option}: there is no column `{column}`.{hint}")
    return column


def texts_of(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [] if value is None else [str(value)]


def is_equal(value: Any, wanted: str) -> bool:
    """Numbers by their value, tags by any of them."""
    if isinstance(value, int | float):
        try:
            return value == float(wanted.replace("_", ""))
        except ValueError:
            return False
    return wanted in texts_of(value)


def is_like(text: str, pattern: str) -> bool:
    """Whether the pattern of a shell fits, or the text holds it."""
    return fnmatchcase(text, pattern) or pattern in text


def ordered(runs: Sequence[ListedRun], order: str, known: Sequence[str]) -> list[ListedRun]:
    column = checked_column(order.removeprefix("-"), known, "--sort")
    there = [run for run in runs if run.values.get(column) is not None]
    there.sort(key=lambda run: run.values[column], reverse=order.startswith("-"))
    return there + [run for run in runs if run.values.get(column) is None]


def find_run(text: str, beside: Path = Path("runs")) -> Path:
    """The run's folder that a command line means: a path, or a name below `runs`.

    Raises:
        CheckpointError: it is no run; the message names those that are near.
    """
    for folder in (Path(text).expanduser(), beside / text):
        if any((folder / name).is_file() for name in (RECIPE, STATUS, METRICS)):
            return folder
    asked = Path(text).expanduser()
    why = "holds neither recipe.yaml nor status.json nor metrics.jsonl" if asked.is_dir() else "is no folder"
    near = {run.name: run for around in (asked, asked.parent, beside) for run in runs_in(around)}
    likely = closest(asked.name, near)
    hint = "`cpt runs FOLDER` lists the runs below a folder."
    if near:
        hint = (
            f"Did you mean {near[likely]}?"
            if likely
            else f"Runs there: {', '.join(map(str, list(near.values())[:8]))}."
        )
    raise CheckpointError(f"{text} is no run: it {why}. {hint}")


def runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if sum((path / name).is_file() for name in OF_A_RUN) > 1]
