"""Checkpoints, evaluation and trackers: when, how many, under which name."""

import re
from pathlib import Path

from cpt.importing.dialect import Dialect
from cpt.importing.ledger import OFF, Ledger
from cpt.importing.lengths import Lengths
from cpt.recipe.words import in_yaml

TRACKERS = {
    "use_wandb": "wandb",
    "use_tensorboard": "tensorboard",
    "use_mlflow": "mlflow",
    "use_comet": "comet_ml",
    "use_swanlab": "swanlab",
    "use_trackio": "trackio",
}
PROJECTS = {
    "wandb_project": "wandb",
    "comet_project_name": "comet_ml",
    "swanlab_project": "swanlab",
    "trackio_project_name": "trackio",
}
RUN_NAMES = (
    "run_name",
    "wandb_name",
    "swanlab_run_name",
    "swanlab_experiment_name",
    "mlflow_run_name",
    "trackio_run_name",
)
NO = ("no", "false")


def write_saving(ledger: Ledger, dialect: Dialect, lengths: Lengths) -> None:
    """When checkpoints are written, and how many are kept."""
    write_interval(ledger, "save", "checkpoints", "saves_per_epoch", lengths)
    if not any(ledger.value(key) is not None for key in ("save_steps", "saves_per_epoch", "save_strategy")):
        write_default_saving(ledger, dialect, lengths)
    kept = ledger.whole("save_total_limit")
    ledger.skip_empty(["save_total_limit"])
    if kept is not None and ledger.recipe.get("checkpoints"):
        ledger.carry("save_total_limit", "checkpoints.keep", kept)
    elif ledger.recipe.get("checkpoints"):
        some = dialect.keeps_by_default
        ledger.put(
            "checkpoints.keep",
            some,
            f"{ledger.called} keeps {some or 'all'}" + ("" if some else "; `keep: 3` the last three"),
        )
    ledger.otherwise("save_total_limit", "nothing to keep: only the end is saved")


def write_default_saving(ledger: Ledger, dialect: Dialect, lengths: Lengths) -> None:
    """Each so many steps, or at the end of each epoch."""
    told = f"the default of {ledger.called}"
    if dialect.saves_by_default:
        ledger.put("checkpoints.every_steps", dialect.saves_by_default, told)
    elif lengths.epochs > 1:
        ledger.put("checkpoints.every_steps", 1 / lengths.epochs, f"{told}: each epoch")


def write_evaluation(ledger: Ledger, dialect: Dialect, lengths: Lengths) -> None:
    """When the held-out documents are looked at, where there are any."""
    evaluation = ledger.recipe.get("evaluation", {})
    if evaluation.get("held_out_share") is None and not evaluation.get("perplexity"):
        for key in ("eval_steps", "evals_per_epoch", "eval_strategy", "evaluation_strategy"):
            ledger.skip_empty([key])
            ledger.otherwise(key, "nothing is held out, so there is nothing to evaluate")
        return
    write_interval(ledger, "eval", "evaluation", "evals_per_epoch", lengths)


def write_interval(ledger: Ledger, what: str, section: str, per_epoch: str, lengths: Lengths) -> None:
    """`every_steps`, as a number of steps or as a share of the run."""
    steps, strategies = f"{what}_steps", [f"{what}_strategy", *(["evaluation_strategy"] if what == "eval" else [])]
    ledger.skip_empty([steps, per_epoch, *strategies])
    named = [key for key in strategies if ledger.value(key) is not None]
    strategy = str(ledger.value(named[0])).lower() if named else ""
    if strategy in NO:
        for key in (*strategies, steps, per_epoch):
            ledger.otherwise(key, "before and after only" if what == "eval" else "only the end is saved")
        return
    amount, times = ledger.number(steps), ledger.number(per_epoch)
    if strategy == "epoch":
        times, amount = 1.0, None
        ledger.otherwise(steps, f"{named[0]}: epoch decides there")
    if amount is not None and amount >= 1:
        ledger.carry(steps, f"{section}.every_steps", int(amount))
    elif amount or times:
        key = steps if amount else per_epoch if ledger.value(per_epoch) else named[0]
        write_share(ledger, key, section, amount or 1 / ((times or 1) * lengths.epochs))
    ledger.otherwise(steps, "no interval")
    ledger.otherwise(per_epoch, "no interval, or save_steps decides")
    for key in strategies:
        told = (
            f"`{section}.every_steps`"
            if strategy in ("steps", "epoch")
            else "in intervals; judge checkpoints by their losses"
        )
        ledger.otherwise(key, told)


def write_share(ledger: Ledger, key: str, section: str, share: float) -> None:
    """An interval that is a share of the run."""
    if share >= 1:
        ledger.otherwise(key, "once, at the end" if section == "checkpoints" else "before and after")
        return
    ledger.put(
        f"{section}.every_steps", share, "" if key.endswith("_steps") else f"{key}: {in_yaml(ledger.value(key))}"
    )
    ledger.otherwise(key, f"{section}.every_steps: {share:.4g} of the run's steps")


def write_tracking(ledger: Ledger) -> None:
    """Trackers and the project's name."""
    reported = ledger.value("report_to", [])
    trackers = [
        str(name)
        for name in (reported if isinstance(reported, list) else [reported])
        if str(name).lower() not in ("none", "false")
    ]
    ledger.skip_empty(["report_to", *TRACKERS, *PROJECTS])
    ledger.enter("report_to", "carried", "monitoring.trackers")
    for key, tracker in TRACKERS.items():
        if ledger.is_on(key):
            trackers.append(tracker)
        ledger.enter(key, "carried", "monitoring.trackers" if ledger.is_on(key) else OFF)
    is_off = str(ledger.value("wandb_mode", "")).lower() == "disabled"
    project = None
    for key, tracker in PROJECTS.items():
        if ledger.value(key):
            trackers.append(tracker)
            project = project or str(ledger.value(key))
            ledger.enter(key, "carried", "monitoring.trackers and .project")
    trackers = [tracker for tracker in dict.fromkeys(trackers) if not (is_off and tracker == "wandb")]
    if trackers:
        ledger.put("monitoring.trackers", trackers)
        if project:
            ledger.put("monitoring.project", project)


def write_name(ledger: Ledger) -> None:
    """The run's name, and where it lies: what is one folder there is a folder in a folder here."""
    stem = ledger.config.path.stem
    output = str(ledger.value("output_dir", "")).rstrip("/")
    given = next((str(ledger.value(key)) for key in RUN_NAMES if ledger.value(key)), None)
    place = Path(output) if output else None
    name = place.name if place is not None and place.name not in ("", ".", "..") else given or stem
    ledger.put(
        "name", re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "imported", "output_dir" if output else ""
    )
    if place is not None:
        ledger.put("output_dir", str(place.parent) if str(place.parent) != "." else "runs", "")
        ledger.enter(
            "output_dir", "carried", f"output_dir and name: {ledger.recipe['output_dir']}/{ledger.recipe['name']}"
        )
    ledger.skip_empty(["output_dir", *RUN_NAMES])
    for key in RUN_NAMES:
        same = str(ledger.value(key)) == ledger.recipe["name"]
        ledger.enter(
            key, "carried" if same else "otherwise", "name" if same else "a run is called as its folder: `name`"
        )
