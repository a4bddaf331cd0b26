"""List, filter and sort the runs below a folder, and find one by its name."""

import math
import operator
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from cpt.errors import CheckpointError, RecipeError
from cpt.plugins import closest, did_you_mean
from cpt.recipe.paths import EXPORT, RECIPE, STATUS
from cpt.runs.folder import (
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
CONDITION = re.compile(r"\s*([\w/.:-]+?)\s*([=<>])\s*(.*?)\s*", re.DOTALL)

Values = dict[str, Any]
"""A run's columns and `eval_<set>_bits_per_byte`: text, number, list of tags, or None. The age is in seconds."""


def list_runs(folder: Path, conditions: Sequence[str] = (), order: str | None = None) -> dict[Path, Values]:
    """All runs below a folder, the newest first.

    Args:
        conditions: that each of them fulfils: `state=finished`, `tag=x`, `loss<2.5`.
        order: a column, the smallest first; with `-` before it the largest. Runs that lack it come last.

    Raises:
        CheckpointError: there is no such folder.
        RecipeError: a column or a condition does not exist.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder. Give the `output_dir` of the runs' recipes: cpt runs FOLDER")
    runs = sorted(((run, values_of(run, folder)) for run in runs_below(folder)), key=lambda run: run[1]["age"])
    columns = list(dict.fromkeys(name for _, values in runs for name in values))
    for condition in conditions:
        fits = condition_of(condition, columns)
        runs = [run for run in runs if fits(run[1])]
    if order:
        column = checked_column(order.removeprefix("-"), columns, "--sort")
        known = [run for run in runs if run[1].get(column) is not None]
        known.sort(key=lambda run: run[1][column], reverse=order.startswith("-"))
        runs = known + [run for run in runs if run[1].get(column) is None]
    return dict(runs)


def runs_below(folder: Path) -> Iterator[Path]:
    """The folders of runs, the given one too; checkpoints and exported models are not searched."""
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not any(fnmatchcase(name, pattern) for pattern in NOT_ENTERED))
        if sum(name in files for name in OF_A_RUN) > 1:
            yield Path(here)


def values_of(run: Path, folder: Path) -> Values:
    recipe, status, figures = read_recipe(run / RECIPE, []), read_status(run), last_figures(run)
    evaluated = {key: value for key, value in figures.items() if key.startswith(EVALUATED)}
    stage, state, steps, tags = recipe.get("stage"), status.get("state"), status.get("steps"), recipe.get("tags")
    return {
        "name": str(run.relative_to(folder)) if run != folder else run.name,
        "stage": stage if isinstance(stage, str) else None,
        "state": state if isinstance(state, str) else "not started" if not figures else "unknown",
        "step": figures.get("step"),
        "steps": steps if isinstance(steps, int) else None,
        "tokens": figures.get("tokens"),
        "loss": figures.get("loss"),
        "bits_per_byte": sum(evaluated.values()) / len(evaluated) if evaluated else None,
        "tokens_per_second": figures.get("tokens_per_second"),
        "age": age_of(run),
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        **evaluated,
    }


def age_of(run: Path) -> float:
    """Seconds since the first start."""
    started = read_object(run / ENVIRONMENT, []).get("started")
    try:
        return time.time() - datetime.fromisoformat(str(started)).timestamp()
    except (ValueError, OverflowError):
        return time.time() - run.stat().st_mtime


def condition_of(text: str, columns: Sequence[str]) -> Callable[[Values], bool]:
    """What a run has to fulfil.

    Raises:
        RecipeError: it is not `column=value`, `column<number` or `column>number`.
    """
    match = CONDITION.fullmatch(text)
    if not match:
        raise RecipeError(f"--where {text!r}: expected a condition like state=finished, tag=x or loss<2.5.")
    column, sign, value = match.groups()
    column = checked_column("tags" if column == "tag" else column, columns, "--where")
    try:
        bound = float(value.replace("_", ""))
    except ValueError as problem:
        if sign != "=":
            raise RecipeError(f"--where {text!r}: expected a number after {sign}, got `{value}`.") from problem
        bound = math.nan

    def fits(values: Values) -> bool:
        found = values.get(column)
        if isinstance(found, int | float):
            return bool({"=": operator.eq, "<": operator.lt, ">": operator.gt}[sign](found, bound))
        return sign == "=" and value in (found if isinstance(found, list) else [found])

    return fits


def checked_column(column: str, columns: Sequence[str], option: str) -> str:
    """The column.

    Raises:
        RecipeError: no run has it.
    """
    if columns and column not in columns:
        hint = did_you_mean(column, columns) or f" There are: {', '.join(columns)}."
        raise RecipeError(f"{option}: there is no column `{column}`.{hint}")
    return column


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
