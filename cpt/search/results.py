"""What a search found: a table of its trials, which keys mattered, and the best recipe as a file that runs."""

import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from cpt.console import open_console
from cpt.files import write_atomic
from cpt.ranks import tell
from cpt.recipe.load import dump_recipe
from cpt.recipe.words import in_yaml, shortened
from cpt.runs.folder import EXPORT
from cpt.runs.record import write_json
from cpt.search.library import optuna
from cpt.search.record import SearchRecord, trial_name
from cpt.search.settings import Settings
from cpt.search.space import Space, recipe_with
from cpt.search.study import REASON, TOKENS, Study

BEST, RESULTS = "best.yaml", "results.json"
FEWEST = 4  # complete trials, below which importance is chance
UNDER_WAY = "under way"
SHOWN = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": UNDER_WAY, "WAITING": UNDER_WAY}
IN_ORDER = ("complete", "pruned", UNDER_WAY, "failed")  # of the table


@dataclass(frozen=True)
class Result:
    """One trial."""

    number: int
    state: str
    values: dict[str, Any]
    """As they were drawn, by key."""
    value: float | None
    """Of a complete trial the figure; of a pruned one what was reported last."""
    tokens: int | None
    """Where that was measured, of a trial that did not come to its end."""
    reason: str


def results_of(study: Study) -> list[Result]:
    """All trials of a study, by number."""
    found = []
    for trial in study.trials:
        last = max(trial.intermediate_values, default=None)
        ended = trial.value if trial.value is not None and trial.state.name == "COMPLETE" else None
        value = ended if ended is not None or last is None else trial.intermediate_values[last]
        values = {axis.key: trial.params[axis.key] for axis in study.space.axes if axis.key in trial.params}
        reason = str(trial.user_attrs.get(REASON, ""))
        tokens = None if ended is not None else trial.user_attrs.get(TOKENS, last)
        found.append(Result(trial.number, SHOWN[trial.state.name], values, value, tokens, reason))
    return found


def best_of(settings: Settings, results: Sequence[Result]) -> Result | None:
    """The complete trial with the best figure, the earliest of equals."""
    complete = [one for one in results if one.state == "complete" and one.value is not None]
    return min(complete, key=partial(rank, settings), default=None)


def rank(settings: Settings, one: Result) -> float:
    """Lower is better."""
    return math.inf if one.value is None else one.value if settings.direction == "minimize" else -one.value


def table_of(space: Space, results: Sequence[Result]) -> Table:
    """One line a trial, the best one first."""
    keys = [axis.key for axis in space.axes]
    reasons = ["reason"] if any(one.state == "failed" for one in results) else []
    table = Table("trial", "state", space.settings.metric, *keys, *reasons)
    for one in sorted(results, key=lambda one: (IN_ORDER.index(one.state), rank(space.settings, one))):
        value = (
            "" if one.value is None else f"{one.value:.5g}" + (f" at {one.tokens:,}" if one.tokens is not None else "")
        )
        reason = shortened(one.reason.partition("\n")[0]) if one.state == "failed" else ""
        table.add_row(
            trial_name(one.number),
            one.state,
            value,
            *(short(one.values.get(key)) for key in keys),
            *[reason][: len(reasons)],
        )
    return table


def short(value: Any) -> str:
    """A value in a cell."""
    return f"{value:.4g}" if isinstance(value, float) else shortened(in_yaml(value))


def importance_of(study: Study) -> dict[str, float]:
    """Share of each key in how much the figures of complete trials differ (PED-ANOVA, arXiv 2304.10255); empty where
    it cannot be told."""
    complete = [one.value for one in results_of(study) if one.state == "complete"]
    if len(complete) < FEWEST or len(set(complete)) < 2 or len(study.space.axes) < 2:
        return {}
    found: dict[str, float] = optuna().importance.get_param_importances(study.optuna)
    return found if all(map(math.isfinite, found.values())) else {}


def write_results(record: SearchRecord, results: Sequence[Result], importance: Mapping[str, float]) -> Path | None:
    """Write all results for programs, and the best recipe; its path, None where no trial came to its end."""
    settings = record.space.settings
    best = best_of(settings, results)
    content = {
        "metric": settings.metric,
        "direction": settings.direction,
        "best": None if best is None else best.number,
        "importance": importance,
        "trials": [{**vars(one), "run": trial_name(one.number)} for one in results],
    }
    write_json(record.folder / RESULTS, content)
    return None if best is None else write_best(record, best, results)


def write_best(record: SearchRecord, best: Result, results: Sequence[Result]) -> Path:
    """The recipe with the best trial's values, which says where they are from."""
    values = {axis.key: axis.value_of(best.values[axis.key]) for axis in record.space.axes}
    recipe = recipe_with(record.root, values, record.space.root.place).model_copy(
        update={"name": f"{record.folder.name}-best"}
    )
    complete = sum(one.state == "complete" for one in results)
    told = [
        (
            f"# The best of {len(results)} trials of {record.folder} ({complete} came to their end):"
            f" {trial_name(best.number)},"
        ),
        f"# {record.space.settings.metric} {best.value:.6g}, with",
        *(f"#   {key} = {in_yaml(value)}" for key, value in values.items()),
    ]
    path = record.folder / BEST
    write_atomic(path, "\n".join(told) + "\n" + dump_recipe(recipe), reuse_space=True)
    return path


def show_results(
    record: SearchRecord, results: Sequence[Result], importance: Mapping[str, float], launched: Sequence[str] = ()
) -> None:
    """The trials, what mattered, and the best recipe with the command that runs it.

    Args:
        launched: the options of `cpt train` that start a run as the trials were.
    """
    open_console().print(table_of(record.space, results), markup=False)
    if importance:
        tell("What mattered: " + ", ".join(f"{key} {share:.0%}" for key, share in importance.items()))
    best = write_results(record, results, importance)
    if best is None:
        tell("No trial came to its end yet.")
        return
    words = shlex.join(["cpt", "train", str(best), *launched])
    tell(f"The best recipe is {best}. Run it: {words}\nCompare the trials: cpt compare {record.folder}/trial-*")


def options_of_train(processes: int, launcher: str | None) -> list[str]:
    """What `cpt train` needs to start a run in the same way."""
    if launcher is not None:
        return ["--supervise", "--launcher", launcher]
    return ["--supervise", "--processes", str(processes)] if processes > 1 else []


def remove_weights(record: SearchRecord, results: Sequence[Result]) -> None:
    """Of the trials that are over, all but the best one's checkpoints and models; what tells of them stays."""
    best = best_of(record.space.settings, results)
    for one in results:
        if one.state != UNDER_WAY and (best is None or one.number != best.number):
            folder = record.run_of(one.number).folder
            for path in [*folder.glob("checkpoint-*"), *folder.glob("weights-*"), folder / "average", folder / EXPORT]:
                shutil.rmtree(path, ignore_errors=True)
