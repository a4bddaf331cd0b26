"""Learning-rate range test: one short run whose learning rate grows until the loss diverges (arXiv 1506.01186)."""

import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from cpt.checkpoints.resume import free_name
from cpt.errors import Interrupted, RecipeError, TrainingError
from cpt.files import read_json_lines
from cpt.process import Child
from cpt.ranks import tell
from cpt.recipe.load import load_recipe
from cpt.recipe.values import in_yaml
from cpt.runs.folder import METRICS
from cpt.runs.record import Run
from cpt.search.search import TRAIN

FEWEST = 20  # steps that make a curve
WINDOW = 1 / 20  # of the test, over which losses are smoothed
RISE = 1.1  # times the lowest smoothed loss: diverged


def exponential(tokens: float, total_tokens: float, *, lowest: float, highest: float = 1.0) -> float:
    """The schedule: grow by the same factor in each step, from `lowest` to `highest` times the recipe's rate."""
    return float(highest * (lowest / highest) ** (1 - min(1.0, tokens / total_tokens)))


def range_test(
    recipe: Path, overrides: Sequence[str], low: float, high: float, *, steps: int, options: Sequence[str], new: bool
) -> None:
    """Train with a growing learning rate and print a tenth of the rate at the lowest smoothed loss, the rule of
    fastai's lr_find (arXiv 2002.04688).

    Args:
        options: of `cpt train`.

    Raises:
        Interrupted: by a signal.
        RecipeError: the bounds are wrong, or the recipe does not run.
        TrainingError: the run ended after too few steps.
    """
    if not 0 < low < high < math.inf:
        raise RecipeError(f"--learning-rates {low:g} {high:g}: expected two numbers above 0, the lower one first.")
    loaded = load_recipe(recipe, overrides)
    batch = loaded.budget.global_batch_tokens
    if batch is None:
        raise RecipeError("a range test needs `budget.global_batch_tokens`: add it, such as 65_536, to the command.")
    folder = loaded.output_dir / f"{loaded.name}-learning-rates"
    run = Run(free_name(folder) if new else folder)
    rate = min(high, 1.0)  # a recipe's limit; the schedule's factor goes beyond it
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
    words = [*overrides, *(f"{key}={in_yaml(value)}" for key, value in changes.items())]
    load_recipe(recipe, words)  # its mistakes first
    tell(f"{run.folder}: {steps} steps, {low:g} to {high:g} ...")
    code, signalled = Child([*TRAIN, str(recipe), *words, *options]).wait_for_end()
    if signalled == signal.SIGINT:
        raise typer.Exit(130)
    if signalled:
        raise Interrupted(f"{signal.Signals(signalled).name}. The same command starts the range test again.")
    logged = [(line["tokens"], line["loss"]) for line in read_json_lines(run.folder / METRICS) if "loss" in line]
    points = [(tokens, loss) for tokens, loss in logged if math.isfinite(loss)]
    if len(points) < FEWEST:
        raise TrainingError(f"the range test ended with code {code} after {len(points)} steps with a loss.")
    for path in (run.export_folder, *run.folder.glob("checkpoint-*")):  # of a model that was spoilt on purpose
        shutil.rmtree(path, ignore_errors=True)
    rates = [rate * exponential(tokens, steps * batch, **ends) for tokens, _ in points]
    losses = smoothed([loss for _, loss in points], steps)
    lowest = min(range(len(losses)), key=losses.__getitem__)
    above = next((at for at in range(lowest, len(losses)) if losses[at] > RISE * losses[lowest]), None)
    tell(f"The smoothed loss is lowest at {rates[lowest]:.1e}: {losses[lowest]:.4g}")
    if above is not None:
        tell(f"It is a tenth above that at {rates[above]:.1e}")
    if above is None and len(points) == len(logged):
        tell(f"It did not diverge up to {high:g}, so there is no suggestion. Repeat with a higher rate, and --new.")
    else:
        suggested = in_yaml(float(f"{rates[lowest] / 10:.1e}"))
        tell(f"Suggested peak: optimizer.learning_rate={suggested}, a tenth of the rate at the lowest loss.")


def smoothed(losses: Sequence[float], steps: int) -> list[float]:
    """An exponential mean over a twentieth of the test, corrected for its beginning."""
    decay = 1 - 1 / max(2.0, WINDOW * steps)
    mean, found = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = decay * mean + (1 - decay) * loss
        found.append(mean / (1 - decay**number))
    return found
