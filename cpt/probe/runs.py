"""Carry out a probe's runs as `cpt train` would, one after the other, and read what they measured."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cpt.errors import RecipeError, TrainingError
from cpt.evaluation.retention import Point, average, read_course
from cpt.probe.law import Curve
from cpt.probe.plan import Plan, ProbeRun
from cpt.recipe.difference import differing_keys
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.folder import METRICS, RECIPE
from cpt.runs.record import Run

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
LOG = "probe.log"  # what the run printed


@dataclass(frozen=True)
class Outcome:
    """What a run measured."""

    run: ProbeRun
    course: list[Point]
    """From before the first step to after the last."""

    def curve(self, plan: Plan, sets: Sequence[str]) -> Curve:
        """As the law takes it: the average of these held-out sets."""
        before, *later = [average(point, sets) for point in self.course]
        steps = np.array([point.step for point in self.course[1:]])
        return Curve(
            self.run.share, plan.rates_of_steps(self.run.rate, self.run.steps), steps, np.array(later) - before
        )

    def at_end(self, sets: Sequence[str]) -> float:
        """Bits per byte after the last step."""
        return average(self.course[-1], sets)


def carry_out(plan: Plan, run: ProbeRun, launcher: str | None = None) -> Outcome:
    """Do a run, or read it where it is done; of its files only the small ones stay.

    Args:
        launcher: what starts the training instead of one Python process: `accelerate launch`, `torchrun
            --nproc_per_node 8`.

    Raises:
        RecipeError: its folder holds a run of another recipe.
        TrainingError: the run failed.
    """
    recipe = plan.recipe_of(run)
    folder = recipe.output_dir / recipe.name
    if not is_done(recipe, folder):
        train(recipe, folder, launcher)
        for heavy in (Run(folder).export_folder, *folder.glob("checkpoint-*")):
            shutil.rmtree(heavy, ignore_errors=True)
    return Outcome(run, read_course(folder / METRICS))


def is_done(recipe: Recipe, folder: Path) -> bool:
    """The run of this very recipe came to its end.

    Raises:
        RecipeError: another recipe's run is there.
    """
    if not (folder / RECIPE).exists():
        return False
    differences = differing_keys(load_recipe(folder / RECIPE), recipe)
    if differences:
        listing = "\n".join(f"  {line}" for line in differences)
        raise RecipeError(
            f"{folder} belongs to a probe of another recipe. What differs (there -> here):\n{listing}\n"
            f"Remove {folder.parent}, or give this recipe a name of its own (name=...)."
        )
    return Run(folder).status().get("state") == "finished"


def train(recipe: Recipe, folder: Path, launcher: str | None) -> None:
    """Start the run in processes of its own and wait for it.

    Raises:
        TrainingError: it failed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = folder.parent / f"{recipe.name}.yaml"
    written.write_text(dump_recipe(recipe), encoding="utf-8")
    log = folder.parent / f"{recipe.name}.{LOG}"
    words = [*(shlex.split(launcher) if launcher else [sys.executable]), str(TRAIN), str(written)]
    with log.open("w", encoding="utf-8") as output:
        code = subprocess.run(
            words, stdout=output, stderr=subprocess.STDOUT, env=dict(os.environ), check=False
        ).returncode
    if code:
        last = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
        raise TrainingError(f"the run {folder} failed with exit code {code}. It printed, at the end ({log}):\n{last}")


def told_run(run: ProbeRun) -> str:
    """`replay 10 %, learning rate 0.0003`."""
    return f"replay {100 * run.share:g} %, learning rate {run.rate:g}"
