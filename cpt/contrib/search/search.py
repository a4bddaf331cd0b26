"""Search for better values of a recipe's keys: sample values, train trials in processes, prune, report."""

import math
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from cpt.contrib.search.space import REASON, Space, ask, import_optuna, overrides_of, unfinished
from cpt.distributed import print_once
from cpt.errors import Interrupted, RecipeError, TrainingError
from cpt.files import free_name, write_atomic
from cpt.formatting import open_console
from cpt.process import Child, ReceivedSignals
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Recipe
from cpt.recipe.values import in_yaml, shortened
from cpt.runs.folder import METRICS, read_objects
from cpt.runs.record import EXPORT, Run, lock_run, write_json

SEARCHED = "searched.yaml"
BEST = "best.yaml"
RESULTS = "results.json"
LOGS = "logs"
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_END = 120.0  # time to save before a pruned trial is killed
MOST_FAILURES = 3  # in a row; a diverging loss is a result and does not count
CELLS = 100  # per run: trials with different batches are compared at the same tokens
TEXT_STAGES = ("pretrain", "cpt")
ORDER = ("complete", "pruned", "running", "fail")  # order of the table
TRAIN = (sys.executable, "-m", "cpt", "train")


def options_of_train(processes: int, launcher: str | None) -> list[str]:
    """The options of `cpt train` for a trial: restart it only after out-of-memory, stop it if it hangs."""
    started_by = ["--processes", str(processes)] if launcher is None else ["--launcher", launcher]
    return ["--supervise", "--restarts", "0", *started_by]


@dataclass
class Trial:
    drawn: Any  # Optuna's trial
    run: Run
    child: Child
    log: Path
    signalled_at: float | None = None
    is_pruned: bool = False

    def signal(self, number: int) -> None:
        """Ask the run to save and stop; later calls have no effect."""
        if self.signalled_at is None:
            self.signalled_at = time.monotonic()
            self.child.send_signal(number)


@dataclass
class Search:
    folder: Path
    recipe: Recipe
    space: Space
    study: Any
    options: Sequence[str] = ()  # of `cpt train`
    environments: Sequence[Mapping[str, str]] = (
        {},
    )  # environment variables of each parallel trial
    running: dict[int, Trial] = field(default_factory=dict)
    failures: int = 0

    def __call__(self) -> None:
        """Run all unfinished trials; after a signal, return when they have saved."""
        waiting = deque(unfinished(self.study))
        received = ReceivedSignals()
        with received.noted():
            try:
                while self.fill(waiting, is_stopping=bool(received.first)):
                    received.wait(SECONDS_BETWEEN_LOOKS)
                    for slot, trial in list(self.running.items()):
                        if received.interrupts > 1:
                            trial.child.kill_family()
                        elif received.first:
                            trial.signal(received.first)
                        if self.is_over(trial):
                            del self.running[slot]
            finally:
                for trial in self.running.values():  # only after an error
                    trial.signal(signal.SIGTERM)
        if received.first:
            name = signal.Signals(received.first).name
            raise Interrupted(f"{name}: the trials have stopped. Repeat the command to continue.")

    def fill(self, waiting: deque[Any], *, is_stopping: bool) -> bool:
        """Start trials in free slots; return whether any is running."""
        for slot, environment in enumerate(self.environments):
            if slot in self.running or is_stopping:
                continue
            drawn = waiting.popleft() if waiting else ask(self.study, self.space)
            if drawn is None:
                break
            self.running[slot] = self.start(drawn, environment)
        return bool(self.running)

    def start(self, drawn: Any, environment: Mapping[str, str]) -> Trial:
        overrides = overrides_of(drawn.params)
        print_once(
            f"{name_of(drawn.number)} of {self.space.settings.trials}: {', '.join(overrides)}"
        )
        run = Run(self.folder / name_of(drawn.number))
        log = self.folder / LOGS / f"{name_of(drawn.number)}.log"
        if run.folder.is_dir() and (lock := lock_run(run.folder, SECONDS_TO_END)) is not None:
            lock.close()  # it was held while a process of an earlier search was saving
        # Tasks would evaluate the base in each trial again; only the run of the best recipe has them.
        evaluation = self.recipe.evaluation
        has_questions = self.recipe.stage in TEXT_STAGES and (
            evaluation.held_out_share or evaluation.perplexity
        )
        tasks = f"evaluation.tasks=[{'{name: domain_test, questions: 0}' if has_questions else ''}]"
        own_overrides = [f"name={run.folder.name}", f"output_dir={self.folder}", tasks]
        own_overrides += ["evaluation.tasks_every_tokens=null", "evaluation.tasks_device=auto"]
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            command = [
                *TRAIN,
                str(self.folder / SEARCHED),
                *overrides,
                *own_overrides,
                *self.options,
            ]
            child = Child(command, environment=environment, output=output)
        return Trial(drawn, run, child, log)

    def is_over(self, trial: Trial) -> bool:
        """Report a trial's new values to Optuna, prune it, or record how it ended."""
        has_ended = trial.child.poll() is not None
        metric = self.space.settings.metric
        lines = read_objects(trial.run.folder / METRICS)  # a resumed run may repeat lines
        points = []
        for line in lines:
            if metric in line:
                points.append((int(line["tokens"]), float(line[metric])))
        reported = self.study.get_trials(deepcopy=False)[trial.drawn.number].intermediate_values
        cell = max(1, (self.recipe.budget.tokens or 0) // CELLS)
        new = {}
        for tokens, value in reversed(points):
            if math.isfinite(value):
                new[tokens // cell * cell] = value
        for step in sorted(new.keys() - reported.keys()):
            trial.drawn.report(new[step], step)
        if has_ended:
            self.end(trial, points[-1][1] if points else None)
        elif (
            trial.signalled_at is None
            and new.keys() - reported.keys()
            and trial.drawn.should_prune()
        ):
            print_once(
                f"{trial.run.folder.name} is pruned at {points[-1][0]:,} tokens: {points[-1][1]:.5g}"
            )
            trial.is_pruned = True
            trial.signal(signal.SIGTERM)
        elif trial.is_pruned and time.monotonic() - (trial.signalled_at or 0) > SECONDS_TO_END:
            trial.child.kill_family()
        return has_ended

    def end(self, trial: Trial, last: float | None) -> None:
        """Record how a trial ended; TrainingError if too many trials in a row failed."""
        states = import_optuna().trial.TrialState
        status = trial.run.status()
        name = trial.run.folder.name
        number = trial.drawn.number
        is_finished = trial.run.is_finished
        self.failures, before = 0, self.failures
        if is_finished and last is not None and math.isfinite(last):
            self.study.tell(number, last)
            print_once(f"{name} complete: {last:.6g}")
        elif trial.is_pruned:
            trial.run.write_status("pruned", message="not among the better trials", exit_code=0)
            self.study.tell(number, state=states.PRUNED)
        elif not is_finished and (
            trial.signalled_at or trial.child.returncode == Interrupted.exit_code
        ):
            print_once(f"{name} was stopped; the next search resumes it")
            return
        else:
            metric = self.space.settings.metric
            if is_finished:
                if last is None:
                    reason = f"no `{metric}` in {METRICS}"
                else:
                    reason = f"the last `{metric}` is {last}"
            elif status.get("state") == "failed":
                reason = f"{status.get('error')}: {status.get('message')}"
            else:
                printed = trial.log.read_text(errors="replace").strip().splitlines()
                reason = printed[-1].strip() if printed else f"exit code {trial.child.returncode}"
            trial.drawn.set_user_attr(REASON, reason)
            self.study.tell(number, state=states.FAIL)
            print_once(f"{name} failed: {reason}")
            has_diverged = (
                status.get("error") == TrainingError.__name__ or is_finished and last is not None
            )
            self.failures = 0 if has_diverged else before + 1
        self.write_results()
        if self.failures >= MOST_FAILURES:
            raise TrainingError(f"{self.failures} trials in a row failed. The last one: {reason}")

    def results(self) -> list[dict[str, Any]]:
        """Return all started trials, the best first."""
        results = []
        for trial in self.study.get_trials(deepcopy=False):
            last = max(trial.intermediate_values, default=None)
            is_complete = trial.state.name == "COMPLETE"
            entry = {
                "number": trial.number,
                "run": name_of(trial.number),
                "state": trial.state.name.lower(),
            }
            entry["value"] = trial.value if is_complete else trial.intermediate_values.get(last)
            entry |= {"tokens": None if is_complete else last, "values": trial.params}
            results.append(entry | {"reason": trial.user_attrs.get(REASON, "")})
        sign = 1 if self.space.settings.direction == "minimize" else -1
        results.sort(
            key=lambda result: math.inf if result["value"] is None else sign * result["value"]
        )
        in_order = []
        for state in ORDER:
            in_order += [result for result in results if result["state"] == state]
        return in_order

    def write_results(self) -> Path | None:
        """Write results.json and the best recipe; return the recipe's path, or None if no trial is complete."""
        settings = self.space.settings
        results = self.results()
        best = next((result for result in results if result["state"] == "complete"), None)
        content = {
            "metric": settings.metric,
            "direction": settings.direction,
            "best": best and best["number"],
        }
        write_json(self.folder / RESULTS, content | {"trials": results})
        if best is None:
            return None
        if settings.keep == "best":
            for result in results:
                if result["state"] != "running" and result is not best:
                    remove_weights(self.folder / result["run"])
        overrides = overrides_of(best["values"])
        recipe = load_recipe(self.folder / SEARCHED, [*overrides, f"name={self.folder.name}-best"])
        heading = f"# {best['run']}, the best of {len(results)} trials: {settings.metric} {best['value']:.6g}\n"
        changes = "".join(f"#   {override}\n" for override in overrides)
        write_atomic(self.folder / BEST, heading + changes + dump_recipe(recipe))
        return self.folder / BEST

    def show_results(self) -> None:
        results = self.results()
        best = self.write_results()
        table = Table(
            "trial", "state", self.space.settings.metric, *self.space.distributions, "reason"
        )
        for result in results:
            at = "" if result["tokens"] is None else f" at {result['tokens']:,}"
            value = "" if result["value"] is None else f"{result['value']:.5g}{at}"
            drawn = [override.partition("=")[2] for override in overrides_of(result["values"])]
            table.add_row(
                result["run"],
                result["state"],
                value,
                *map(shortened, drawn),
                shortened(result["reason"]),
            )
        open_console().print(table, markup=False)
        if best is None:
            print_once("No trial is complete yet.")
        else:
            print_once(
                f"Train the best recipe: cpt train {best}\nCompare the trials: cpt compare {self.folder}/trial-*"
            )


def remove_weights(run: Path) -> None:
    for path in [*run.glob("checkpoint-*"), *run.glob("weights-*"), run / "average", run / EXPORT]:
        shutil.rmtree(path, ignore_errors=True)


def name_of(number: int) -> str:
    return f"trial-{number:03d}"


FEWEST = 20  # minimal steps for a curve
WINDOW = 1 / 20  # of the test, over which losses are smoothed
RISE = 1.1  # times the lowest smoothed loss: diverged


def exponential(
    tokens: float, total_tokens: float, *, lowest: float, highest: float = 1.0
) -> float:
    """The schedule: grow exponentially, from `lowest` to `highest` times the recipe's rate."""
    return float(highest * (lowest / highest) ** (1 - min(1.0, tokens / total_tokens)))


def range_test(
    recipe: Path,
    overrides: Sequence[str],
    low: float,
    high: float,
    *,
    steps: int,
    options: Sequence[str],
    new: bool,
) -> None:
    """Learning-rate range test (arXiv 1506.01186): one short run whose learning rate grows until the loss diverges.
    Suggest a tenth of the rate at the lowest smoothed loss, the rule of fastai's lr_find (arXiv 2002.04688)."""
    if not 0 < low < high < math.inf:
        raise RecipeError(
            f"--learning-rates {low:g} {high:g}: expected two numbers above 0, the lower one first."
        )
    loaded = load_recipe(recipe, overrides)
    batch = loaded.budget.global_batch_tokens
    if batch is None:
        raise RecipeError(
            "a range test needs `budget.global_batch_tokens`: add it, such as 65_536."
        )
    folder = loaded.output_dir / f"{loaded.name}-learning-rates"
    run = Run(free_name(folder) if new else folder)
    rate = min(high, 1.0)  # a recipe's limit; the schedule's factor may exceed it
    ends = {"lowest": low / rate, "highest": high / rate}
    changes: dict[str, Any] = {
        "schedule": {"name": f"{exponential.__module__}:{exponential.__name__}", **ends},
        "optimizer.learning_rate": rate,
        "budget": {"tokens": steps * batch, "global_batch_tokens": batch},
        "data.phases": [],
        "checkpoints": {},
        "evaluation": {},
        "safety.loss_guard": None,
        "training.logging_steps": 1,
        "name": run.folder.name,
    }
    arguments = [*overrides, *(f"{key}={in_yaml(value)}" for key, value in changes.items())]
    load_recipe(recipe, arguments)  # report its mistakes first
    print_once(f"{run.folder}: {steps} steps, {low:g} to {high:g} ...")
    code, signalled = Child([*TRAIN, str(recipe), *arguments, *options]).wait_for_end()
    if signalled:
        raise Interrupted(
            f"{signal.Signals(signalled).name}. Repeat the command to restart the range test."
        )
    rates: list[float] = []
    losses: list[float] = []
    diverged = False
    for line in read_objects(run.folder / METRICS):
        if "loss" not in line:
            continue
        if math.isfinite(line["loss"]):
            rates.append(rate * exponential(line["tokens"], steps * batch, **ends))
            losses.append(line["loss"])
        else:
            diverged = True
    if len(losses) < FEWEST:
        raise TrainingError(
            f"the range test ended with code {code} after {len(losses)} steps with a loss."
        )
    remove_weights(run.folder)  # of a diverged model
    suggest_rate(rates, smoothed(losses, WINDOW * steps), high, diverged=diverged)


def smoothed(losses: Sequence[float], window: float) -> list[float]:
    """Return the exponential moving average with bias correction over about `window` losses."""
    decay = 1 - 1 / max(2.0, window)
    mean = 0.0
    means = []
    for number, loss in enumerate(losses, start=1):
        mean = decay * mean + (1 - decay) * loss
        means.append(mean / (1 - decay**number))
    return means


def suggest_rate(
    rates: Sequence[float], losses: Sequence[float], high: float, *, diverged: bool
) -> None:
    """Print the rate at the lowest loss, and a tenth of it as a suggestion if the loss rises after it."""
    lowest = min(range(len(losses)), key=losses.__getitem__)
    print_once(f"The smoothed loss is lowest at {rates[lowest]:.1e}: {losses[lowest]:.4g}")
    for rate, loss in zip(rates[lowest:], losses[lowest:], strict=True):
        if loss > RISE * losses[lowest]:
            print_once(f"It exceeds that by a tenth at {rate:.1e}")
            diverged = True
            break
    if diverged:
        suggested = in_yaml(float(f"{rates[lowest] / 10:.1e}"))
        print_once(
            f"Suggested peak: optimizer.learning_rate={suggested}, a tenth of the rate at the lowest loss."
        )
    else:
        print_once(
            f"It did not diverge up to {high:g}, so no rate is suggested. Repeat with a higher rate, and --new."
        )
