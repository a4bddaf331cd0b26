"""Learning-rate range test: one short run whose learning rate grows until the loss diverges (arXiv 1506.01186)."""

import json
import math
import shutil
import signal
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import typer

from cpt.errors import Interrupted, RecipeError, TrainingError
from cpt.files import write_atomic
from cpt.launchers.attempts import command_of_attempt
from cpt.ranks import tell
from cpt.recipe.difference import differing_keys
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Node, Place
from cpt.recipe.words import in_yaml
from cpt.runs.folder import RECIPE
from cpt.runs.record import Run, write_json
from cpt.search.figures import Tail
from cpt.search.gates import mistakes_of
from cpt.search.growing import exponential
from cpt.search.range_curve import RULE, RangeCurve, curve_of, plot_curve
from cpt.search.signals import Signals
from cpt.search.space import recipe_with
from cpt.search.trial import TrialRun

RESULT, PICTURE = "learning_rates.json", "learning_rates.png"
FEWEST = 20  # steps, of which a curve can be made
HOPELESS = 2.0  # times the lowest smoothed loss: the rest of the test would tell nothing
SECONDS_BETWEEN_LOOKS = 0.5
SCHEDULE = f"{exponential.__module__}:{exponential.__name__}"


@dataclass(frozen=True)
class Range:
    """What is tested."""

    low: float
    high: float
    steps: int
    tokens: int
    """Of the whole test."""

    def learning_rate(self, tokens: int) -> float:
        """After so many tokens."""
        return self.high * exponential(tokens, self.tokens, lowest=self.low / self.high)


def range_test(
    recipe: Recipe,
    root: Node,
    low: float,
    high: float,
    *,
    steps: int,
    processes: int = 1,
    launcher: str | None = None,
    new: bool = False,
) -> RangeCurve:
    """Run the test, or read what it found before; tell where the loss falls, where it diverges, and the peak to begin
    with.

    Raises:
        Interrupted: it was told to stop; the same command begins it anew.
        RecipeError: the bounds cannot be, the recipe cannot run, or the folder holds another test.
        typer.Exit: Ctrl-C.
        TrainingError: the run ended before there was anything to see.
    """
    if not 0 < low < high or not math.isfinite(high):
        raise RecipeError(f"--learning-rates {low:g} {high:g}: give two numbers above 0, the lower one first.")
    wanted = Range(low, high, steps, steps * tokens_per_step(recipe, processes))
    tested = recipe_of_test(recipe, root, wanted, new=new)
    run = Run(tested.output_dir / tested.name)
    if (run.folder / RECIPE).exists() and (differing := differing_keys(load_recipe(run.folder / RECIPE), tested)):
        listing = "\n".join(f"  {line}" for line in differing)
        raise RecipeError(
            f"{run.folder} holds another range test. What differs (there -> here):\n{listing}\nStart anew beside it:"
            " --new."
        )
    if not (run.folder / RESULT).exists():
        if mistakes := mistakes_of({"": tested})[""]:
            raise RecipeError("\n".join(mistakes))
        watched(run, tested, wanted, processes, launcher)
    return told(run, wanted)


def tokens_per_step(recipe: Recipe, processes: int) -> int:
    """Of the recipe's own optimizer steps.

    Raises:
        RecipeError: only the machine knows.
    """
    if recipe.budget.global_batch_tokens is not None:
        return recipe.budget.global_batch_tokens
    factors = [
        recipe.training.get(key, default)
        for key, default in (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1))
    ]
    if not all(isinstance(factor, int) for factor in factors):
        raise RecipeError(
            "a range test needs to know the tokens of a step: write `budget.global_batch_tokens` into the recipe."
        )
    return recipe.data.sequence_length * processes * math.prod(factors)


def recipe_of_test(recipe: Recipe, root: Node, wanted: Range, *, new: bool) -> Recipe:
    """The recipe with a growing learning rate and without all that would hide what it does: guard, curriculum,
    evaluation, saves.

    Raises:
        RecipeError: it does not pass the gates of shape and sense.
    """
    rate = min(wanted.high, 1.0)  # a recipe has no higher one; a range test may go beyond it
    values: dict[str, Any] = {
        "schedule": {"name": SCHEDULE, "lowest": wanted.low / rate, "highest": wanted.high / rate},
        "optimizer.learning_rate": rate,
        "budget": {"tokens": wanted.tokens, "global_batch_tokens": recipe.budget.global_batch_tokens},
        "data.phases": [],
        "data.total_tokens": None,
        "checkpoints": {},
        "evaluation": {},
        "safety.loss_guard": None,
        "training.logging_steps": 1,
    }
    changed = recipe_with(root, values, Place("--learning-rates", 0))
    name, number = f"{recipe.name}-learning-rates", 1
    while new and (recipe.output_dir / name).exists():
        number += 1
        name = f"{recipe.name}-learning-rates-{number}"
    about = f"Learning-rate range test from {in_yaml(wanted.low)} to {in_yaml(wanted.high)}"
    return changed.model_copy(update={"name": name, "description": about, "tags": [*recipe.tags, "range-test"]})


def watched(run: Run, recipe: Recipe, wanted: Range, processes: int, launcher: str | None) -> None:
    """Train until the test is over or the loss has left all bounds.

    Raises:
        Interrupted: it was told to stop.
        TrainingError: it ended before there was anything to see.
    """
    file = run.folder.with_name(f"{run.folder.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, dump_recipe(recipe), reuse_space=True)
    words = command_of_attempt([str(file), "--resume", "none"], processes, launcher)
    signals, points, ending, is_hopeless = Signals(), list[tuple[int, float]](), None, False
    with signals.noted():
        tell(f"{run.folder}: {wanted.steps} steps, {wanted.low:g} to {wanted.high:g} ...")
        trial = TrialRun(run, words, "loss", run.folder / "output.log")
        while ending is None:
            signals.wake.wait(SECONDS_BETWEEN_LOOKS)
            new, ending = trial.look()
            points += new
            is_hopeless = is_hopeless or left_all_bounds(points, trial.tail)
            if ending is None and not trial.told and (signals.first or is_hopeless):
                trial.stop(signals.first or signal.SIGTERM)
    if signals.first == signal.SIGINT:
        tell("Interrupted. The same command begins the range test anew.")
        raise typer.Exit(130)
    if signals.first:
        raise Interrupted(
            f"{signal.Signals(signals.first).name}: the range test was stopped; the same command begins it anew."
        )
    if len(points) < FEWEST or not (is_hopeless or ending.state in ("complete", "failed")):
        raise TrainingError(
            f"the range test ended after {len(points)} steps: {ending.reason or ending.state}. Its output: {trial.log}"
        )
    file.unlink(missing_ok=True)
    for path in (run.export_folder, *run.folder.glob("checkpoint-*")):  # of a model that was spoilt on purpose
        shutil.rmtree(path, ignore_errors=True)
    run.write_status("finished", message="the loss diverged, as it was meant to" if is_hopeless else "", exit_code=0)
    write_json(run.folder / RESULT, {**asdict(wanted), "losses": points})


def left_all_bounds(points: list[tuple[int, float]], tail: Tail) -> bool:
    """Whether the rest of the test would tell nothing: the loss is no number any more, or twice the lowest."""
    if len(points) < FEWEST:
        return False
    smoothed = curve_of(np.ones(len(points)), np.array([loss for _, loss in points]), len(points)).smoothed
    return tail.last is not None and not math.isfinite(tail.last) or bool(smoothed[-1] > HOPELESS * smoothed.min())


def told(run: Run, wanted: Range) -> RangeCurve:
    """The curve of a test that is over, its picture, and what follows for the recipe."""
    found = json.loads((run.folder / RESULT).read_text())
    tokens, losses = (np.array(column, dtype=np.float64) for column in zip(*found["losses"], strict=True))
    curve = curve_of(np.array([wanted.learning_rate(at) for at in tokens]), losses, wanted.steps)
    plot_curve(curve, run.folder / PICTURE)
    for name, index in {
        "falls fastest": curve.steepest,
        "is lowest": curve.lowest,
        "is a tenth above that": curve.diverges,
    }.items():
        if index is not None:
            tell(f"The smoothed loss {name} at {curve.learning_rates[index]:.1e}: {curve.smoothed[index]:.4g}")
    tell(f"The curve: {run.folder / PICTURE}")
    if curve.suggested is None:
        tell(
            f"It did not diverge up to {wanted.high:g}, so no peak can be suggested: repeat the test with a higher"
            " one, and --new."
        )
    else:
        tell(
            f"Suggested peak: {curve.suggested:g}, {RULE}. Take it over:"
            f" optimizer.learning_rate={in_yaml(curve.suggested)}"
        )
    return curve
