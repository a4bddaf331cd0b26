"""Read a pipeline's file: steps, each a recipe with keys on top, that are checked before the first one starts."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.errors import RecipeError
from cpt.plugins import did_you_mean
from cpt.recipe.difference import differing_keys
from cpt.recipe.load import load_recipe, load_with_places
from cpt.recipe.schema import Recipe
from cpt.recipe.tree import Mistakes, Node, UnreadableError, plain, read_yaml
from cpt.runs.folder import RECIPE
from cpt.runs.record import Run

KEYS = ("name", "description", "steps")


@dataclass(frozen=True)
class Step:
    number: int
    """From 1."""
    file: Path
    overrides: tuple[str, ...]
    recipe: Recipe
    root: Node
    """The recipe's tree, to show mistakes with their lines."""

    @property
    def run(self) -> Run:
        return Run(self.recipe.output_dir / self.recipe.name)

    @property
    def awaits(self) -> list[str]:
        """Models that an earlier step may make."""
        teacher = self.recipe.training.get("teacher_model_name_or_path")
        rewards = [reward.options.get("path") for reward in self.recipe.rewards]
        named = [self.recipe.model.path, self.recipe.tokenizer.path, teacher, *rewards]
        return [path for path in named if isinstance(path, str) and path]


@dataclass(frozen=True)
class Pipeline:
    name: str
    steps: tuple[Step, ...]

    def made_by_others(self, step: Step) -> list[Step]:
        """The steps whose runs this one continues from."""
        return [other for other in self.steps if any(is_below(other.run.folder, path) for path in step.awaits)]


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Read the file and all of its recipes.

    Args:
        overrides: `key.path=value` on top of every step.

    Raises:
        RecipeError: every mistake of the file and of the recipes, with its line.
    """
    mistakes = Mistakes()
    try:
        root = read_yaml(path, mistakes)
    except UnreadableError:
        mistakes.raise_if_any()
        raise
    written = root.value
    for key, node in written.items():
        if key not in KEYS:
            there = f"There is: {', '.join(KEYS)}"
            mistakes.add(node.place, f"`{key}` is not a key of a pipeline.{did_you_mean(key, KEYS)} {there}")
    if "name" not in written or not isinstance(written["name"].value, str):
        mistakes.add(root.place, "`name` is missing: the pipeline's name")
    if "steps" not in written or not isinstance(written["steps"].value, list) or not written["steps"].value:
        example = "`steps: [{recipe: pretrain.yaml}, {recipe: sft.yaml}]`"
        mistakes.add(root.place, f"`steps` is missing: a list of recipes, {example}")
        mistakes.raise_if_any()
    steps, complaints = [], []
    for number, node in enumerate(written["steps"].value, start=1):
        keys = plain(node)
        if not isinstance(keys, dict) or not isinstance(keys.get("recipe"), str):
            example = "`{recipe: sft.yaml, name: chat}`"
            mistakes.add(node.place, f"step {number}: `recipe` is missing, the path of a YAML file: {example}")
            continue
        file = path.parent / Path(keys.pop("recipe")).expanduser()
        on_top = (*as_overrides(keys), *overrides)
        try:
            steps.append(Step(number, file, on_top, *load_with_places(file, on_top)))
        except RecipeError as problem:
            complaints.append(f"step {number} ({file}):\n{problem}")
    mistakes.raise_if_any()
    pipeline = Pipeline(str(written["name"].value), tuple(steps))
    complaints += [f"{path}: {complaint}" for complaint in misfits(pipeline)]
    if complaints:
        raise RecipeError("\n".join(complaints))
    return pipeline


def as_overrides(keys: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """`{model: {path: x}}` and `{model.path: x}` as the command line has them: `model.path="x"`."""
    for key, value in keys.items():
        if isinstance(value, dict) and value:
            yield from as_overrides(value, f"{above}{key}.")
        else:
            yield f"{above}{key}={json.dumps(value)}"


def misfits(pipeline: Pipeline) -> Iterator[str]:
    """Steps that would be one run, that read what only a later one makes, or whose run has another recipe."""
    for step in pipeline.steps:
        folder = step.run.folder
        for other in pipeline.steps[: step.number - 1]:
            if other.run.folder == folder:
                yield f"steps {other.number} and {step.number} are one run, {folder}. Give one of them a `name`."
        for other in pipeline.made_by_others(step):
            if other.number >= step.number:
                text = f"step {step.number} continues from {other.run.folder}, which step {other.number} makes."
                yield f"{text} Put that one before it."
        saved = folder / RECIPE
        if saved.exists() and (differences := differing_keys(load_recipe(saved), step.recipe)):
            listing = "\n".join(f"  {line}" for line in differences)
            yield (
                f"step {step.number}: {folder} belongs to a run of another recipe (there -> here):\n{listing}\n"
                "Give the step a `name` of its own, or remove the folder."
            )


def is_below(folder: Path, path: str) -> bool:
    """Whether the path is the folder, or lies in it."""
    place, folder = Path(path).expanduser().absolute(), folder.absolute()
    return place == folder or folder in place.parents
