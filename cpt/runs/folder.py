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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from cpt.errors import CheckpointError, RecipeError
from cpt.files import DAMAGED, json_lines, parse_object, write_atomic
from cpt.plugins import closest, did_you_mean
from cpt.recipe.paths import EXPORT as EXPORT
from cpt.recipe.paths import RECIPE as RECIPE
from cpt.recipe.paths import STATUS as STATUS
from cpt.recipe.tree import Mistakes, UnreadableError, plain, read_yaml

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


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
TASK = "task_"  # prefix of a task's metric; it has a separate line, later than lines of later steps
DIED = "died"
NEWEST = {"step", "tokens", "loss", "tokens_per_second"}  # metrics of the list of runs
LAST_BYTES = 16 * 2**20  # the end of the metrics file read by `last_metrics`

Content = dict[str, Any]
Report = Callable[[str], object]


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
        objects = list(json_lines(path))
    except FileNotFoundError:
        return []
    except OSError as problem:
        report(f"{path} cannot be read: {problem.strerror}")
        return []
    num_damaged = objects.count(None)
    if num_damaged:
        lines = "lines" if num_damaged > 1 else "line"
        report(f"{path}: {num_damaged:,} damaged {lines}")
    return [content for content in objects if content is not None]


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
    lines_until = [line for line in lines if is_until(line, step)]
    damaged = [line for line in lines if line.endswith(b"\n") and parse_object(line) is None]
    if damaged:
        message = f"{path}: {len(damaged):,} damaged line(s) are removed."
        log.warning(message, extra={"event": DAMAGED})
    content = b"".join(lines_until)
    if lines_until == lines[: len(lines_until)]:  # the usual case: truncating needs no disk space
        os.truncate(path, len(content))
    else:
        write_atomic(path, content, reuse_space=True)


def is_until(line: str | bytes, step: int) -> bool:
    """Whether it is a complete line of a step up to `step`."""
    try:
        return line[-1:] in ("\n", b"\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):  # a damaged line
        return False


@dataclass(frozen=True)
class Metrics:
    columns: Mapping[str, "Floats"]
    """Metric -> one value per line, NaN for lines without it; always has `step` and `tokens`."""

    @property
    def names(self) -> list[str]:
        import numpy as np  # which `cpt train` must not import before it has checked the recipe

        return [name for name, values in self.columns.items() if not np.isnan(values).all()]

    def curve(self, name: str, over: str = "tokens") -> "tuple[Floats, Floats]":
        """Tokens (or another metric) and values, in ascending order; both empty if the metric was never logged."""
        import numpy as np

        if name not in self.columns or over not in self.columns:
            return np.empty(0), np.empty(0)
        x = self.columns[over]
        y = self.columns[name]
        logged = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
        order = logged[np.argsort(x[logged], kind="stable")]
        return x[order], y[order]

    def last(self, name: str) -> float | None:
        _, values = self.curve(name)
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
        sets = {}
        for metric in self.names:
            if is_bits_per_byte(metric):
                sets[set_name(metric)] = metric
        return sets


def read_metrics(folder: Path, names: Collection[str] | None = None) -> Metrics:
    """Values that are not finite count as not logged. Reading only some `names` (or `eval_*`) is faster."""
    import numpy as np

    @cache  # most lines have the same names
    def selected(logged_names: tuple[str, ...]) -> list[str]:
        if names is None:
            return list(logged_names)
        patterns = ("step", "tokens", *names)
        return [name for name in logged_names if matches_any(name, patterns)]

    lines_of: defaultdict[str, list[int]] = defaultdict(list)
    values_of: defaultdict[str, list[float]] = defaultdict(list)
    num_lines = 0
    try:
        for line in json_lines(folder / METRICS):
            if line is None:
                continue
            for name in selected(tuple(line)):
                if isinstance(line[name], int | float):
                    lines_of[name].append(num_lines)
                    values_of[name].append(line[name])
            num_lines += 1
    except OSError:  # missing, or lost while reading
        pass
    columns: dict[str, Floats] = {}
    for name in dict.fromkeys(("step", "tokens", *values_of)):
        column = np.full(num_lines, math.nan)
        column[lines_of[name]] = values_of[name]
        columns[name] = np.where(np.isfinite(column), column, math.nan)
    return Metrics(columns)


def matches_any(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def last_metrics(folder: Path) -> dict[str, float]:
    """Newest values of `NEWEST` and each set's bits per byte, from the end of the file."""
    newest: dict[str, float] = {}
    try:
        with (folder / METRICS).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        has_evaluation = any(map(is_bits_per_byte, newest))
        is_evaluation = not has_evaluation and BITS_PER_BYTE.encode() in line
        is_needed = is_evaluation or not newest.keys() >= NEWEST
        if not is_needed or f'"{TASK}'.encode() in line:  # tasks are of an earlier step
            continue
        content = parse_object(line) or {}
        for name, value in content.items():
            is_selected = name in NEWEST or (is_evaluation and is_bits_per_byte(name))
            if is_selected and isinstance(value, int | float) and math.isfinite(value):
                newest.setdefault(name, value)
    return newest


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
        owner = (folder / LOCK).read_text(errors="replace").split()  # process PID on HOST
        is_gone = owner[3] == socket.gethostname() and not is_alive(int(owner[1]))
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
            METRICS: self.metrics.names,
        }
        return [name for name, content in contents.items() if not content]

    @property
    def environments(self) -> list[Content]:
        """The environment of each start; empty if that of the first is unknown."""
        first = self.environment
        if not first:
            return []
        later = [{**first, **differences} for differences in self.starts]
        return [first, *later]

    @property
    def changes(self) -> list[Content]:
        """The changed keys of the recipe, each with the step and the note of its line in the history."""
        changes: list[Content] = []
        for line in self.history:
            changes += [{**line, **change} for change in line["changes"]]
        return changes

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
    """The runs that a run began from, directly or through another one, with the last step in common."""
    last_common_steps: dict[Path, int] = {}
    checkpoint = began_from(folder)
    while checkpoint is not None and checkpoint.parent not in last_common_steps:
        _, _, step = checkpoint.name.rpartition("-")
        if not step.isdecimal():  # of another program
            break
        trunk = checkpoint.parent
        last_common_steps[trunk] = min([int(step), *last_common_steps.values()])
        checkpoint = began_from(trunk)
    return last_common_steps


def get(content: object, *keys: str) -> Any:
    """The value under nested keys; None if one is missing."""
    for key in keys:
        if not isinstance(content, Mapping):
            return None
        content = content.get(key)
    return content


def get_dict(content: object, *keys: str) -> Content:
    value = get(content, *keys)
    if isinstance(value, dict):
        return value
    return {}


def name_gpus(environment: Content) -> str:
    """`8 x NVIDIA H100`, or `none`."""
    counts = Counter(get(environment, "hardware", "gpus") or [])
    return ", ".join(f"{count} x {name}" for name, count in counts.items()) or "none"


OF_A_RUN = (RECIPE, STATUS, METRICS, ENVIRONMENT, INPUTS)
NOT_ENTERED = ("checkpoint-*", EXPORT, "held_out", "heartbeats", ".*", "__pycache__")
COMPARISONS = {"=": operator.eq, "<": operator.lt, ">": operator.gt}
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
    runs = {run: values_of(run, folder) for run in run_folders(folder)}
    newest_first = sorted(runs, key=lambda run: runs[run]["age"])
    columns = list(dict.fromkeys(chain.from_iterable(runs[run] for run in newest_first)))
    selected = newest_first
    for condition in conditions:
        is_met = condition_of(condition, columns)
        selected = [run for run in selected if is_met(runs[run])]
    if order:
        column = checked_column(order.removeprefix("-"), columns, "--sort")
        with_value = [run for run in selected if runs[run].get(column) is not None]
        without_value = [run for run in selected if runs[run].get(column) is None]
        with_value.sort(key=lambda run: runs[run][column], reverse=order.startswith("-"))
        selected = with_value + without_value
    return {run: runs[run] for run in selected}


def run_folders(folder: Path) -> Iterator[Path]:
    """Yield the runs below a folder, without entering checkpoints and exported models."""
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not matches_any(name, NOT_ENTERED))
        if len(set(files).intersection(OF_A_RUN)) > 1:
            yield Path(path)


def values_of(run: Path, folder: Path) -> Values:
    recipe = read_recipe(run / RECIPE)
    status = read_status(run)
    metrics = last_metrics(run)
    evaluated = {key: value for key, value in metrics.items() if key.startswith(EVALUATED)}
    mean_bits_per_byte = None
    if evaluated:
        mean_bits_per_byte = sum(evaluated.values()) / len(evaluated)
    state = status.get("state")
    if not isinstance(state, str):
        state = "unknown" if metrics else "not started"
    checkpoint = began_from(run)
    tags = recipe.get("tags")
    if not isinstance(tags, list):
        tags = []
    return {
        "name": str(run.relative_to(folder)) if run != folder else run.name,
        "stage": if_instance(recipe.get("stage"), str),
        "state": state,
        "step": metrics.get("step"),
        "steps": if_instance(status.get("steps"), int),
        "tokens": metrics.get("tokens"),
        "loss": metrics.get("loss"),
        "bits_per_byte": mean_bits_per_byte,
        "tokens_per_second": metrics.get("tokens_per_second"),
        "age": time.time() - started_at(run),
        "from": "/".join(checkpoint.parts[-2:]) if checkpoint else None,
        "tags": list(map(str, tags)),
        **evaluated,
    }


def if_instance(value: Any, kind: type) -> Any:
    """Return a value of a file that anybody may have edited; None if it has another type."""
    if isinstance(value, kind):
        return value
    return None


def started_at(run: Path) -> float:
    """When the run started, in seconds since 1970; if that is unknown, when its folder last changed."""
    started = read_object(run / ENVIRONMENT).get("started")
    try:
        return datetime.fromisoformat(str(started)).timestamp()
    except (ValueError, OverflowError):
        return run.stat().st_mtime


def condition_of(text: str, columns: Sequence[str]) -> Callable[[Values], bool]:
    """Parse a condition; RecipeError if it is not `column=value`, `column<number` or `column>number`."""
    match = CONDITION.fullmatch(text)
    if not match:
        raise RecipeError(
            f"--where {text!r}: expected a condition like state=finished, tag=x or loss<2.5."
        )
    column, sign, expected = match.groups()
    if column == "tag":
        column = "tags"
    column = checked_column(column, columns, "--where")
    try:
        bound = float(expected.replace("_", ""))
    except ValueError as problem:
        if sign != "=":
            raise RecipeError(
                f"--where {text!r}: expected a number after {sign}, got `{expected}`."
            ) from problem
        bound = math.nan

    def is_met(values: Values) -> bool:
        value = values.get(column)
        if isinstance(value, int | float):
            return bool(COMPARISONS[sign](value, bound))
        if sign != "=":
            return False
        if isinstance(value, list):
            return expected in value
        return bool(value == expected)

    return is_met


def checked_column(column: str, columns: Sequence[str], option: str) -> str:
    if columns and column not in columns:
        hint = did_you_mean(column, columns) or f"Columns: {', '.join(columns)}."
        raise RecipeError(f"{option}: unknown column `{column}`.{hint}")
    return column


def find_run(text: str, runs: Path = Path("runs")) -> Path:
    """Find a run's folder by path, or by name below `runs`; CheckpointError suggests a similar one."""
    path = Path(text).expanduser()
    for folder in (path, runs / text):
        if any((folder / name).is_file() for name in (RECIPE, STATUS, METRICS)):
            return folder
    near: dict[str, Path] = {}
    for folder in (path, path.parent, runs):
        if not folder.is_dir():
            continue
        for run in folder.iterdir():
            files = [name for name in OF_A_RUN if (run / name).is_file()]
            if len(files) > 1:
                near[run.name] = run
    similar = closest(path.name, near)
    hint = "`cpt runs FOLDER` lists the runs below a folder."
    if similar:
        hint = f"Did you mean {near[similar]}?"
    raise CheckpointError(
        f"{text} is not a run: it has neither {RECIPE} nor {STATUS} nor {METRICS}. {hint}"
    )
