"""Learning-rate range test: one short run whose learning rate grows until the loss diverges (arXiv 1506.01186)."""

import math
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from cpt.errors import Interrupted, RecipeError, ResourceError, TrainingError
from cpt.files import read_json_lines
from cpt.process import Child
from cpt.ranks import tell
from cpt.recipe.load import load_recipe
from cpt.recipe.words import in_yaml
from cpt.runs.folder import METRICS
from cpt.runs.record import Run
from cpt.search.search import TRAIN

PICTURE = "learning_rates.png"
FEWEST = 20  # steps that make a curve
WINDOW = 1 / 20  # of the test, over which losses are smoothed
RISE = 1.1  # times the lowest smoothed loss: diverged

Numbers = NDArray[np.float64]


def exponential(tokens: float, total_tokens: float, *, lowest: float, highest: float = 1.0) -> float:
    """The schedule: grow by the same factor in each step, from `lowest` to `highest` times the recipe's learning
    rate."""
    return float(highest * (lowest / highest) ** (1 - min(1.0, tokens / total_tokens)))


def range_test(
    recipe: Path,
    overrides: Sequence[str],
    low: float,
    high: float,
    *,
    steps: int,
    options: Sequence[str] = (),
    new: bool = False,
) -> float | None:
    """Train with a growing learning rate and without loss guard, curriculum, evaluation and checkpoints; print where
    the loss falls and diverges, and the suggested peak.

    The suggestion is a tenth of the learning rate at the lowest smoothed loss, the rule of fastai's lr_find (arXiv
    2002.04688).

    Args:
        options: of `cpt train`.

    Returns:
        The suggestion; None if the loss did not diverge, so that rates that are too high are not known.

    Raises:
        Interrupted: by a signal.
        RecipeError: the bounds make no sense, or the recipe does not run.
        TrainingError: the run ended after too few steps.
    """
    if not 0 < low < high < math.inf:
        raise RecipeError(f"--learning-rates {low:g} {high:g}: expected two numbers above 0, the lower one first.")
    loaded = load_recipe(recipe, overrides)
    batch = loaded.budget.global_batch_tokens
    if batch is None:
        raise RecipeError("a range test needs `budget.global_batch_tokens`: add it, such as 65_536, to the command.")
    name, number = f"{loaded.name}-learning-rates", 1
    while new and (loaded.output_dir / name).exists():
        number += 1
        name = f"{loaded.name}-learning-rates-{number}"
    rate = min(high, 1.0)  # the highest that a recipe may have; a range test may go beyond
    schedule = {
        "name": f"{exponential.__module__}:{exponential.__name__}",
        "lowest": low / rate,
        "highest": high / rate,
    }
    changes: dict[str, Any] = {
        "schedule": schedule,
        "optimizer.learning_rate": rate,
        "budget": {"tokens": steps * batch, "global_batch_tokens": batch},
        "data.phases": [],
        "checkpoints": {},
        "evaluation": {},
        "safety.loss_guard": None,
        "training.logging_steps": 1,
        "name": name,
    }
    words = [*overrides, *(f"{key}={in_yaml(value)}" for key, value in changes.items())]
    load_recipe(recipe, words)  # its mistakes first
    run = Run(loaded.output_dir / name)
    tell(f"{run.folder}: {steps} steps, {low:g} to {high:g} ...")
    code, signalled = Child([*TRAIN, str(recipe), *words, *options]).wait_for_end()
    if signalled == signal.SIGINT:
        raise typer.Exit(130)
    if signalled:
        raise Interrupted(f"{signal.Signals(signalled).name}. The same command starts the range test again.")
    found = [(line["tokens"], line["loss"]) for line in read_json_lines(run.folder / METRICS) if "loss" in line]
    finite = [point for point in found if math.isfinite(point[1])]
    if len(finite) < FEWEST:
        raise TrainingError(f"the range test ended with code {code} after {len(finite)} steps with a loss.")
    for path in (run.export_folder, *run.folder.glob("checkpoint-*")):  # of a model that was spoilt on purpose
        shutil.rmtree(path, ignore_errors=True)
    tokens, losses = (np.array(column, dtype=np.float64) for column in zip(*finite, strict=True))
    rates = np.array([rate * exponential(at, steps * batch, lowest=low / rate, highest=high / rate) for at in tokens])
    smoothed = smooth(losses, steps)
    lowest = int(smoothed.argmin())
    above = np.flatnonzero(smoothed[lowest:] > RISE * smoothed[lowest])
    has_diverged = len(above) > 0 or len(finite) < len(found)
    tell(f"The smoothed loss is lowest at {rates[lowest]:.1e}: {smoothed[lowest]:.4g}")
    if len(above):
        tell(f"It is a tenth above that at {rates[lowest + above[0]]:.1e}")
    suggested = float(f"{rates[lowest] / 10:.1e}") if has_diverged else None
    plot(rates, losses, smoothed, suggested, run.folder / PICTURE)
    if suggested is None:
        tell(f"It did not diverge up to {high:g}, so there is no suggestion. Repeat with a higher rate, and --new.")
    else:
        tell(f"Suggested peak: optimizer.learning_rate={in_yaml(suggested)}, a tenth of the rate at the lowest loss.")
    return suggested


def smooth(losses: Numbers, steps: int) -> Numbers:
    """An exponential mean over a twentieth of the test, corrected for its beginning."""
    kept = 1 - 1 / max(2.0, WINDOW * steps)
    mean, smoothed = 0.0, []
    for number, loss in enumerate(losses, start=1):
        mean = kept * mean + (1 - kept) * float(loss)
        smoothed.append(mean / (1 - kept**number))
    return np.array(smoothed)


def plot(rates: Numbers, losses: Numbers, smoothed: Numbers, suggested: float | None, path: Path) -> None:
    """Draw the loss over the learning rate.

    Raises:
        ResourceError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no display, no state
    except ImportError as problem:
        raise ResourceError("the curve needs matplotlib. Install it: pip install 'cpt[search]'") from problem
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes: Any = figure.subplots()
    axes.plot(rates, losses, color="0.75", linewidth=0.8, label="loss")
    axes.plot(rates, smoothed, color="C0", label="smoothed")
    if suggested is not None:
        axes.axvline(suggested, color="C2", linestyle=":", label=f"suggested peak {suggested:g}")
    axes.set(xscale="log", ylim=(0.95 * losses.min(), 1.1 * smoothed[0]), xlabel="learning rate", ylabel="loss")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    tell(f"The curve: {path}")
