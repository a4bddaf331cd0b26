"""Runs and documents in a page's folder, made in a second out of the tiny recipes that come with cpt."""

import contextlib
import shutil
from pathlib import Path

from cpt.recipe.load import load_recipe
from cpt.train import train

TINY = ("budget.tokens=8_192", "checkpoints.every_steps=4", "training.logging_steps=2")


def tiny_run(folder: Path, name: str, *overrides: str, recipe: str = "recipes/tiny/pretrain.yaml") -> Path:
    """A finished run of eight steps, in `runs/` of the page's folder."""
    with contextlib.chdir(folder):
        train(load_recipe(recipe, [f"name={name}", *TINY, *overrides]))
    return folder / "runs" / name


def tiny_base(folder: Path, name: str, *overrides: str) -> Path:
    """A model's folder that is called as a page calls its base: `Qwen/Qwen3-0.6B-Base`."""
    run = tiny_run(folder, f"before-{Path(name).name}", *overrides)
    shutil.copytree(run / "final", folder / name)
    shutil.rmtree(run)
    return folder / name


def tiny_texts(path: Path) -> Path:
    """The texts of the tiny recipes under another name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).parents[3] / "recipes" / "tiny" / "data" / "texts.jsonl", path)
    return path
