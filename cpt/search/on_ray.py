"""The same search on a cluster: Ray Tune places the trials, Optuna draws their values, each is a run in processes of
its own."""

import json
import os
import signal
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from cpt.errors import RecipeError, ResourceError, TrainingError
from cpt.launchers.attempts import command_of_attempt, send
from cpt.ranks import tell
from cpt.runs.signs import pids_here
from cpt.search.figures import Tail
from cpt.search.library import optuna
from cpt.search.pruners import length
from cpt.search.record import LOGS, SearchRecord, trial_name
from cpt.search.results import Result, options_of_train, show_results
from cpt.search.samplers import build_sampler
from cpt.search.settings import Settings
from cpt.search.space import Space
from cpt.search.trial import Ending, TrialRun, is_held

FOLDER, EXPERIMENT = "ray", "tune"
TOKENS, NUMBER = "tokens", "trial_number"
SECONDS_BETWEEN_LOOKS = 0.5
REDUCTION_FACTOR = 3
# Set before Ray is imported: it tells nobody that it is used, and little here; recipes' paths stay what they are, and
# Ctrl-C is ours.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


def search_with_ray(record: SearchRecord, again: str, *, processes: int = 1, launcher: str | None = None) -> None:
    """Run all trials that are not over, on the cluster that RAY_ADDRESS names or else on this machine alone.

    The search's folder must be one that all machines share.

    Args:
        again: the command that goes on.
        processes: of each trial, on one machine, with a GPU for each where the cluster has GPUs.

    Raises:
        RecipeError: Ray has no such pruner.
        ResourceError: Ray is not installed.
        typer.Exit: Ctrl-C.
    """
    ray = imported()
    settings, total = record.space.settings, record.recipe.budget.tokens
    scheduler = scheduler_of(settings, total)
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
    share = {"CPU": processes, **({"GPU": processes} if ray.cluster_resources().get("GPU") else {})}
    trainable = ray.tune.with_resources(trainable_of(replace(record, lock=None), processes, launcher), share)
    place = (record.folder / FOLDER).absolute()
    tell(f"Trials by Ray Tune; what they print is in {record.folder / LOGS}.")
    try:
        if any((place / EXPERIMENT).glob("experiment_state-*.json")):
            tuner = ray.tune.Tuner.restore(str(place / EXPERIMENT), trainable=trainable)
        else:
            run_config = ray.tune.RunConfig(name=EXPERIMENT, storage_path=str(place), verbose=0)
            tuner = ray.tune.Tuner(trainable, tune_config=config_of(record.space, scheduler), run_config=run_config)
        tuner.fit()
    except KeyboardInterrupt as problem:
        stop_trials(record)
        tell(f"Interrupted. The same command goes on: {again}")
        raise typer.Exit(130) from problem
    finally:
        ray.shutdown()
    show_results(record, results_of_runs(record), {}, options_of_train(processes, launcher))


def imported() -> Any:
    """Ray with Tune, told to keep to itself.

    Raises:
        ResourceError: it is not installed.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        import ray
        import ray.tune
        import ray.tune.schedulers
        import ray.tune.search.optuna
    except ImportError as problem:
        raise ResourceError("--ray needs Ray Tune. Install it: pip install 'cpt[search,ray]'") from problem
    return ray


def scheduler_of(settings: Settings, total_tokens: int | None) -> Any:
    """What ends trials early, by Ray's own means.

    Raises:
        RecipeError: there is none of that name.
    """
    schedulers, name, options = imported().tune.schedulers, settings.pruner.name, settings.pruner.options
    if name == "none":
        return schedulers.FIFOScheduler()
    if name == "median" and not options.keys() - {"startup_trials", "warmup_tokens"}:
        grace, least = options.get("warmup_tokens", 0), options.get("startup_trials", 4)
        return schedulers.MedianStoppingRule(time_attr=TOKENS, grace_period=grace, min_samples_required=least)
    if name in ("halving", "hyperband") and not options.keys() - {"least_tokens", "reduction_factor"}:
        total, factor = length(total_tokens, name), options.get("reduction_factor", REDUCTION_FACTOR)
        grace = max(1, options.get("least_tokens") or total // factor**3)
        return schedulers.ASHAScheduler(time_attr=TOKENS, max_t=total, grace_period=grace, reduction_factor=factor)
    raise RecipeError(
        f"`search.pruner: {name}`{' with these options' if options else ''} is not for --ray. It has: none; median"
        " (startup_trials, warmup_tokens); halving and hyperband (least_tokens, reduction_factor)."
    )


def config_of(space: Space, scheduler: Any) -> Any:
    """Who draws, who ends early, and how many trials there are."""
    tune, settings = imported().tune, space.settings
    optuna()
    mode = "min" if settings.direction == "minimize" else "max"
    search = tune.search.optuna.OptunaSearch(
        space=partial(draw_all, space),
        metric=settings.metric,
        mode=mode,
        sampler=build_sampler(space, 0),
        study_name=EXPERIMENT,
    )
    return tune.TuneConfig(
        metric=settings.metric,
        mode=mode,
        search_alg=search,
        scheduler=scheduler,
        num_samples=space.num_trials,
        trial_dirname_creator=lambda trial: trial_name(trial.config[NUMBER]),
    )


def draw_all(space: Space, trial: Any) -> dict[str, int]:
    """Draw all values of Optuna's trial; what it gives besides is its number, which Ray does not tell."""
    for axis in space.axes:
        axis.suggest(trial)
    return {NUMBER: trial.number}


def stop_trials(record: SearchRecord) -> None:
    """Tell those of this machine to save and end; on others they come to their end, and are found again."""
    for folder in record.folder.glob("trial-*"):
        for pid in pids_here(folder) if is_held(folder) else []:
            send(pid, signal.SIGTERM)


@dataclass
class Watched:
    """A trial's run as Ray's process for it sees it."""

    run: TrialRun
    tokens: int = 0
    ending: Ending | None = None

    def next_figures(self) -> dict[str, Any]:
        """Wait for the figure's next value, or the end.

        Raises:
            TrainingError: the run failed.
        """
        while True:
            points, self.ending = self.run.look()
            if self.ending is not None and self.ending.state != "complete":
                raise TrainingError(self.ending.reason or self.ending.state)
            self.tokens = points[-1][0] if points else self.tokens
            if self.ending is not None:
                return {TOKENS: self.tokens, self.run.metric: self.ending.value, "done": True}
            if points:
                return {TOKENS: self.tokens, self.run.metric: points[-1][1]}
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def end(self) -> None:
        """Ray ended the trial: it is pruned, unless it came to its end."""
        if self.ending is None:
            self.run.prune(f"ended by Ray Tune at {self.tokens:,} tokens")
        while self.ending is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            self.ending = self.run.look()[1]


def trainable_of(record: SearchRecord, processes: int, launcher: str | None) -> Any:
    """What Ray runs on one of its machines for each trial: a process that starts the run and watches it."""
    here = Path.cwd()

    class RunOfTrial(imported().tune.Trainable):  # type: ignore[misc]
        """The run goes on from checkpoints of its own."""

        def setup(self, config: dict[str, Any]) -> None:
            """Start the run, or go on with it."""
            os.chdir(here)
            number = config[NUMBER]
            values = {axis.key: axis.value_of(config[axis.key]) for axis in record.space.axes}
            words = command_of_attempt([str(record.write_trial(number, values))], processes, launcher)
            self.watched = Watched(
                TrialRun(record.run_of(number), words, record.space.settings.metric, record.log_of(number))
            )

        def step(self) -> dict[str, Any]:
            """The figure's next value, or the last one."""
            return self.watched.next_figures()

        def save_checkpoint(self, checkpoint_dir: str) -> dict[str, Any]:
            """All there is to know is in the run's folder."""
            return {NUMBER: self.config[NUMBER]}

        def load_checkpoint(self, checkpoint: dict[str, Any] | None) -> None:
            """The run has found its own by now."""

        def cleanup(self) -> None:
            """Ray has no more use for it."""
            self.watched.end()

    return RunOfTrial


def results_of_runs(record: SearchRecord) -> list[Result]:
    """As the trials' own folders tell them."""
    states = {"finished": "complete", "pruned": "pruned", "failed": "failed"}
    results = []
    for file in sorted((record.folder / FOLDER / EXPERIMENT).glob("trial-*/params.json")):
        config = json.loads(file.read_text())
        run = record.run_of(config[NUMBER])
        tail, status = Tail(run.folder, record.space.settings.metric), run.status()
        points, state = tail.new_values(), states.get(str(status.get("state")), "under way")
        tokens = points[-1][0] if points and state != "complete" else None
        reason = str(status.get("message", "")) if state == "failed" else ""
        results.append(
            Result(
                config[NUMBER],
                state,
                {axis.key: config[axis.key] for axis in record.space.axes},
                tail.last,
                tokens,
                reason,
            )
        )
    return results
