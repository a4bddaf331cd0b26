"""Read a run's folder, and find the runs below a folder. Files may be missing, truncated or damaged."""

import json
import logging
import math
import operator
import os
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from cpt.errors import CheckpointError, RecipeError
from cpt.files import DAMAGED, json_lines, parse_object, write_atomic
from cpt.plugins import closest, did_you_mean
from cpt.recipe.paths import EXPORT as EXPORT
from cpt.recipe.paths import RECIPE as RECIPE
from cpt.recipe.paths import STATUS as STATUS
from cpt.recipe.tree import Mistakes, UnreadableError, plain, read_yaml

log = logging.getLogger("cpt")

ENVIRONMENT = "environment.json"
STARTS = "starts.jsonl"
INPUTS = "inputs.json"
PLAN = "plan.json"
RESOLVED = "resolved.yaml"
RECORD = "record.json"  # recipe and history, sealed; a checkpoint has a copy, see cpt.runs.history
LEARNED = "learned.json"
MANIFEST = "manifest.json"  # of a checkpoint or an export
METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
SAMPLES = "samples.jsonl"
HISTORY = "history.jsonl"
BEGAN = "began_from.json"  # the checkpoint of another run that this run started from
VERDICT = "verdict.json"
VERDICT_PAGE = "verdict.md"
HEARTBEATS = "heartbeats"
HELD_OUT = "held_out"
PROFILE = "profile"
LOCK = ".lock"
# prefix and suffix of a held-out set's metric
EVALUATED = "eval_"
BITS_PER_BYTE = "_bits_per_byte"
OF_TIME = ("_runtime", "_per_second")  # suffixes of the times of an evaluation
TASK = "task_"  # prefix of a task's metric; a line of its own, later than lines of later steps
DIED = "died"
NEWEST = {"step", "tokens", "loss", "tokens_per_second"}  # metrics of the list of runs
LAST_BYTES = 16 * 2**20  # the end of the metrics file read by `last_metrics`

Content = dict[str, Any]
Report = Callable[[str], object]
Floats = NDArray[np.float64]


def read_object(path: Path, report: Report = log.debug) -> Content:
    """The object in a JSON file; empty if it is missing or damaged (then `report` gets a message)."""
    try:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        return content
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as problem:
        report(f"{path} cannot be read: {problem}")
        return {}


def read_objects(path: Path, report: Report = log.debug) -> list[Content]:
    """The objects of a JSONL file without damaged lines (then `report` gets a message with their number)."""
    try:
        found = list(json_lines(path))
    except FileNotFoundError:
        return []
    except OSError as problem:
        report(f"{path} cannot be read: {problem.strerror}")
        return []
    lost = found.count(None)
    if lost:
        report(f"{path}: {lost:,} damaged line{'s' if lost > 1 else ''}")
    return [content for content in found if content is not None]


def read_lines(path: Path) -> list[Content]:
    """Like `read_objects`; damage is logged, which creates an event of the run."""
    return read_objects(
        path, lambda sentence: log.warning(f"{sentence}.", extra={"event": DAMAGED})
    )


def read_recipe(path: Path, report: Report = log.debug) -> Content:
    """A recipe's keys and values as written; they may be unknown to the schema."""
    if not path.exists():
        return {}
    try:
        return dict(plain(read_yaml(path, Mistakes())))
    except (UnreadableError, TypeError, ValueError) as problem:
        report(f"{path} cannot be read: {str(problem).partition(chr(10))[0]}")
        return {}


def keep_lines_until(path: Path, step: int) -> None:
    """Remove the lines of a JSONL file after a step; the file is unchanged after an OSError."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if is_until(line, step)]
    damaged = sum(parse_object(line) is None for line in lines if line.endswith(b"\n"))
    if damaged:
        log.warning(f"{path}: {damaged:,} damaged line(s) are removed.", extra={"event": DAMAGED})
    if kept == lines[: len(kept)]:  # the usual case: truncating needs no disk space
        os.truncate(path, len(b"".join(kept)))
    else:
        write_atomic(path, b"".join(kept), reuse_space=True)


def is_until(line: str | bytes, step: int) -> bool:
    """Whether it is a complete line of a step up to `step`."""
    try:
        return line[-1:] in ("\n", b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):  # a damaged line
        return False


@dataclass(frozen=True)
class Metrics:
    columns: Mapping[str, Floats]
    """Metric -> one value per line, NaN for lines without it; always has `step` and `tokens`."""

    @property
    def names(self) -> list[str]:
        return [name for name, values in self.columns.items() if not np.isnan(values).all()]

    def curve(self, name: str, over: str = "tokens") -> tuple[Floats, Floats]:
        """Tokens (or another metric) and values, in ascending order; both empty if the metric was never logged."""
        if name not in self.columns or over not in self.columns:
            return np.empty(0), np.empty(0)
        x = self.columns[over]
        y = self.columns[name]
        there = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        order = there[np.argsort(x[there], kind="stable")]
        return x[order], y[order]

    def last(self, name: str) -> float | None:
        values = self.curve(name)[1]
        if len(values):
            return float(values[-1])
        return None

    def after(self, step: int) -> "Metrics":
        """The lines of later steps."""
        is_later = self.columns["step"] > step
        return Metrics({name: values[is_later] for name, values in self.columns.items()})

    @property
    def held_out_sets(self) -> dict[str, str]:
        """Held-out set -> its metric `eval_<name>_bits_per_byte`."""
        return {set_name(metric): metric for metric in self.names if is_bits_per_byte(metric)}


def read_metrics(folder: Path, names: Collection[str] | None = None) -> Metrics:
    """Values that are not finite count as not logged. Reading only some `names` (or `eval_*`) is faster."""

    @cache
    def wanted(keys: tuple[str, ...]) -> list[str]:
        return [
            key
            for key in keys
            if names is None
            or key in ("step", "tokens")
            or any(fnmatchcase(key, one) for one in names)
        ]

    places: defaultdict[str, list[int]] = defaultdict(list)
    values: defaultdict[str, list[float]] = defaultdict(list)
    num_lines = 0
    try:
        for line in json_lines(folder / METRICS):
            if line is None:
                continue
            for name in wanted(tuple(line)):
                if isinstance(line[name], int | float):
                    places[name].append(num_lines)
                    values[name].append(line[name])
            num_lines += 1
    except OSError:  # missing, or lost while reading
        pass
    columns: dict[str, Floats] = {}
    for name in dict.fromkeys(("step", "tokens", *values)):
        column = np.full(num_lines, math.nan)
        column[places[name]] = values[name]
        columns[name] = np.where(np.isfinite(column), column, math.nan)
    return Metrics(columns)


def last_metrics(folder: Path) -> dict[str, float]:
    """Newest values of `NEWEST` and each set's bits per byte, from the end of the file."""
    found: dict[str, float] = {}
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        is_evaluation = BITS_PER_BYTE.encode() in line and not any(map(is_bits_per_byte, found))
        is_known = found.keys() >= NEWEST and not is_evaluation
        if is_known or f'"{TASK}'.encode() in line:  # tasks are of an earlier step
            continue
        for name, value in (parse_object(line) or {}).items():
            is_wanted = name in NEWEST or (is_evaluation and is_bits_per_byte(name))
            if is_wanted and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, value)
    return found


def is_bits_per_byte(name: str) -> bool:
    return name.startswith(EVALUATED) and name.endswith(BITS_PER_BYTE)


def set_name(name: str) -> str:
    """Return `general` for `eval_general_bits_per_byte`."""
    return name.removeprefix(EVALUATED).removesuffix(BITS_PER_BYTE)


def read_status(folder: Path, report: Report = log.debug) -> Content:
    """The status; its state is `died` if it is `running` but the process no longer exists on this host."""
    status = read_object(folder / STATUS, report)
    if status.get("state") != "running":
        return status
    try:
        words = (folder / LOCK).read_text(errors="replace").split()  # process PID on HOST
        is_gone = words[3] == socket.gethostname() and not is_alive(int(words[1]))
    except (OSError, ValueError, IndexError):
        pid = status.get("pid")
        is_gone = isinstance(pid, int) and not is_alive(pid)
    if is_gone:
        return {**status, "state": DIED}
    return status


def is_alive(pid: int) -> bool:
    return 0 < pid < 2**31 and psutil.pid_exists(pid)


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    recipe: Content
    """The recipe as written, without defaults of this version."""
    metrics: Metrics
    environment: Content = field(default_factory=dict)
    starts: list[Content] = field(default_factory=list)
    """Differences of later starts from the first."""
    history: list[Content] = field(default_factory=list)
    """Changes of the recipe: see `cpt.runs.history`."""
    inputs: Content = field(default_factory=dict)
    plan: Content = field(default_factory=dict)
    status: Content = field(default_factory=dict)
    verdict: Content = field(default_factory=dict)
    events: list[Content] = field(default_factory=list)
    trunks: dict[Path, int] = field(default_factory=dict)
    """Runs that this one began from, directly or through another one, with the last step in common."""
    unreadable: list[str] = field(default_factory=list)
    """A message for each file, or part of one, that cannot be read."""

    @property
    def missing(self) -> list[str]:
        """Files that every run has, and that are missing or unreadable here."""
        contents = {
            RECIPE: self.recipe,
            ENVIRONMENT: self.environment,
            INPUTS: self.inputs,
            STATUS: self.status,
        }
        return [
            name
            for name, content in {**contents, METRICS: self.metrics.names}.items()
            if not content
        ]

    @property
    def environments(self) -> list[Content]:
        """The environment of each start; empty if that of the first is unknown."""
        first = self.environment
        if first:
            return [first, *({**first, **start} for start in self.starts)]
        return []

    @property
    def changes(self) -> list[Content]:
        """The changed keys of the recipe, each with the step and the note of its line in the history."""
        return [{**line, **change} for line in self.history for change in line["changes"]]

    @property
    def state(self) -> str:
        return str(self.status.get("state", "unknown"))

    @property
    def stage(self) -> str | None:
        stage = self.recipe.get("stage")
        if isinstance(stage, str):
            return stage
        return None


def read_run(folder: Path, names: Collection[str] | None = None) -> RunRecord:
    """Read a run; `names` are those for `read_metrics`."""
    unreadable: list[str] = []
    report = unreadable.append
    return RunRecord(
        folder=folder,
        recipe=read_recipe(folder / RECIPE, report),
        metrics=read_metrics(folder, names),
        environment=read_object(folder / ENVIRONMENT, report),
        starts=read_objects(folder / STARTS, report),
        history=read_objects(folder / HISTORY, report),
        inputs=read_object(folder / INPUTS, report),
        plan=read_object(folder / PLAN, report),
        status=read_status(folder, report),
        verdict=read_object(folder / VERDICT, report),
        events=read_objects(folder / EVENTS, report),
        trunks=trunks_of(folder),
        unreadable=unreadable,
    )


def began_from(folder: Path) -> Path | None:
    """The checkpoint of another run that this run started from."""
    checkpoint = read_object(folder / BEGAN).get("checkpoint")
    if isinstance(checkpoint, str):
        return Path(checkpoint)
    return None


def trunks_of(folder: Path) -> dict[Path, int]:
    found: dict[Path, int] = {}
    while (checkpoint := began_from(folder)) is not None and (
        folder := checkpoint.parent
    ) not in found:
        step = checkpoint.name.rpartition("-")[2]
        if not step.isdecimal():  # of another program
            break
        found[folder] = min([int(step), *found.values()])
    return found


def get(content: object, *keys: str) -> Any:
    """The value under nested keys; None if one is missing."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def get_dict(content: object, *keys: str) -> Content:
    found = get(content, *keys)
    if isinstance(found, dict):
        return found
    return {}


def name_gpus(environment: Content) -> str:
    """`8 x NVIDIA H100`, or `none`."""
    counts = Counter(get(environment, "hardware", "gpus") or [])
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


OF_A_RUN = (RECIPE, STATUS, METRICS, ENVIRONMENT, INPUTS)
NOT_ENTERED = ("checkpoint-*", EXPORT, "held_out", "heartbeats", ".*", "__pycache__")
CONDITION = re.compile(r"\s*([\w/.:-]+?)\s*([=<>])\s*(.*?)\s*", re.DOTALL)

Values = dict[str, Any]
"""A run's columns and `eval_<set>_bits_per_byte`: text, number, list of tags, or None. The age is in seconds."""


def list_runs(
    folder: Path, conditions: Sequence[str] = (), order: str | None = None
) -> dict[Path, Values]:
    """All runs below a folder, newest first.

    Args:
        conditions: all must be met: `state=finished`, `tag=x`, `loss<2.5`.
        order: a column, smallest value first; with `-`, largest first. Runs without it come last.

    Raises:
        CheckpointError: the folder does not exist.
        RecipeError: an unknown column, or an invalid condition.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder. Give the `output_dir` of the recipes: cpt runs FOLDER"
        )
    runs: list[tuple[Path, Values]] = []
    for here, folders, files in os.walk(folder):  # skips checkpoints and exported models
        folders[:] = sorted(
            name
            for name in folders
            if not any(fnmatchcase(name, pattern) for pattern in NOT_ENTERED)
        )
        if sum(name in files for name in OF_A_RUN) > 1:
            runs.append((Path(here), values_of(Path(here), folder)))
    runs.sort(key=lambda run: run[1]["age"])
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


def values_of(run: Path, folder: Path) -> Values:
    recipe = read_recipe(run / RECIPE)
    status = read_status(run)
    metrics = last_metrics(run)
    evaluated = {key: value for key, value in metrics.items() if key.startswith(EVALUATED)}
    stage = recipe.get("stage")
    state = status.get("state")
    steps = status.get("steps")
    tags = recipe.get("tags")
    try:
        started = datetime.fromisoformat(
            str(read_object(run / ENVIRONMENT).get("started"))
        ).timestamp()
    except (ValueError, OverflowError):
        started = run.stat().st_mtime
    return {
        "name": str(run.relative_to(folder)) if run != folder else run.name,
        "stage": stage if isinstance(stage, str) else None,
        "state": state if isinstance(state, str) else "not started" if not metrics else "unknown",
        "step": metrics.get("step"),
        "steps": steps if isinstance(steps, int) else None,
        "tokens": metrics.get("tokens"),
        "loss": metrics.get("loss"),
        "bits_per_byte": sum(evaluated.values()) / len(evaluated) if evaluated else None,
        "tokens_per_second": metrics.get("tokens_per_second"),
        "age": time.time() - started,
        "from": "/".join(began.parts[-2:]) if (began := began_from(run)) else None,
        "tags": [str(tag) for tag in tags] if isinstance(tags, list) else [],
        **evaluated,
    }


def condition_of(text: str, columns: Sequence[str]) -> Callable[[Values], bool]:
    """Parse a condition; RecipeError if it is not `column=value`, `column<number` or `column>number`."""
    match = CONDITION.fullmatch(text)
    if not match:
        raise RecipeError(
            f"--where {text!r}: expected a condition like state=finished, tag=x or loss<2.5."
        )
    column, sign, value = match.groups()
    column = checked_column("tags" if column == "tag" else column, columns, "--where")
    try:
        bound = float(value.replace("_", ""))
    except ValueError as problem:
        if sign != "=":
            raise RecipeError(
                f"--where {text!r}: expected a number after {sign}, got `{value}`."
            ) from problem
        bound = math.nan

    def fits(values: Values) -> bool:
        found = values.get(column)
        if isinstance(found, int | float):
            return bool({"=": operator.eq, "<": operator.lt, ">": operator.gt}[sign](found, bound))
        return sign == "=" and value in (found if isinstance(found, list) else [found])

    return fits


def checked_column(column: str, columns: Sequence[str], option: str) -> str:
    if columns and column not in columns:
        hint = did_you_mean(column, columns) or f"Columns: {', '.join(columns)}."
        raise RecipeError(f"{option}: unknown column `{column}`.{hint}")
    return column


def find_run(text: str, beside: Path = Path("runs")) -> Path:
    """Find a run's folder by path, or by name below `runs`; CheckpointError suggests a similar one."""
    asked = Path(text).expanduser()
    for folder in (asked, beside / text):
        if any((folder / name).is_file() for name in (RECIPE, STATUS, METRICS)):
            return folder
    runs = [
        run
        for folder in (asked, asked.parent, beside)
        if folder.is_dir()
        for run in folder.iterdir()
    ]
    near = {run.name: run for run in runs if sum((run / name).is_file() for name in OF_A_RUN) > 1}
    likely = closest(asked.name, near)
    hint = (
        f"Did you mean {near[likely]}?"
        if likely
        else "`cpt runs FOLDER` lists the runs below a folder."
    )
    raise CheckpointError(
        f"{text} is not a run: it has neither {RECIPE} nor {STATUS} nor {METRICS}. {hint}"
    )
