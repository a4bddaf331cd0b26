"""The search's folder: what is searched, so that the same command goes on and another one is refused; and each trial's
recipe."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpt.errors import CheckpointError, LaunchError, RecipeError
from cpt.files import write_atomic
from cpt.recipe.difference import differences, differing_keys, shown
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import Component, Recipe
from cpt.recipe.tree import Node
from cpt.runs.record import Run, hold, write_json
from cpt.search.figures import TEXT_STAGES, held_out_sets
from cpt.search.space import Space, recipe_with

RECORD, SEARCHED = "search.json", "searched.yaml"
RECIPES, LOGS = "recipes", "logs"
FIXED = ("metric", "direction", "sampler", "seed")  # of the settings: what the study's earlier trials rest on
WITHOUT_QUESTIONS = Component.model_validate({"name": "domain_test", "questions": 0})


@dataclass(frozen=True)
class SearchRecord:
    """A search's folder, output_dir/name.

    Args:
        recipe: that is searched around.
        root: its tree.
        lock: held to the end of the process: two searches would run each other's trials.
    """

    folder: Path
    space: Space
    recipe: Recipe
    root: Node
    lock: Any = None

    def run_of(self, number: int) -> Run:
        """A trial's run."""
        return Run(self.folder / trial_name(number))

    def log_of(self, number: int) -> Path:
        """What a trial's processes print."""
        return self.folder / LOGS / f"{trial_name(number)}.log"

    def write_trial(self, number: int, values: dict[str, Any]) -> Path:
        """The trial's recipe as a file.

        Tasks that are measured when a run has ended are left to the run of the best recipe: they would judge each
        trial's base anew.

        Raises:
            RecipeError: the values do not fit together.
        """
        recipe = recipe_with(self.root, values, self.space.root.place)
        has_questions = recipe.stage in TEXT_STAGES and held_out_sets(recipe)
        evaluation = recipe.evaluation.model_copy(update={"tasks": [WITHOUT_QUESTIONS] if has_questions else []})
        named = {
            "name": trial_name(number),
            "output_dir": self.folder,
            "description": (
                f"A trial of {self.folder.name}. {recipe.description}".strip()
            ),  # the same for all: only values differ
            "tags": [*recipe.tags, "trial", self.folder.name],
            "evaluation": evaluation,
        }
        path = self.folder / RECIPES / f"{trial_name(number)}.yaml"
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, dump_recipe(recipe.model_copy(update=named)), reuse_space=True)
        return path


def trial_name(number: int) -> str:
    """`trial-003`."""
    return f"trial-{number:03d}"


def claim(recipe: Recipe, root: Node, space: Space, *, new: bool = False) -> SearchRecord:
    """Make the search's folder, or find the one that this search has already.

    Args:
        new: where the name is taken, append -2, -3, ... instead of going on there.

    Raises:
        LaunchError: another process searches there right now.
        RecipeError: the folder belongs to a search of another recipe or space, or to something else.
    """
    folder = folder_of(recipe, space, new=new)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder)
    except LaunchError as problem:
        raise LaunchError(
            f"another process searches in {folder} right now. Wait for it or end it; beside it: --new."
        ) from problem
    except OSError as problem:
        raise RecipeError(
            f"`output_dir`: cannot write into {folder}: {problem.strerror}. Set output_dir to a folder you can write."
        ) from problem
    if (folder / RECORD).exists():
        refuse_another(folder, recipe, space)
    elif any(path.name not in (".lock", SEARCHED) for path in folder.iterdir()):
        raise RecipeError(
            f"{folder} is there already and holds no search. Give the search another name: `search: {{name: ...}}`."
        )
    write_atomic(folder / SEARCHED, dump_recipe(recipe), reuse_space=True)
    write_json(folder / RECORD, described(space))
    return SearchRecord(folder, space, recipe, root, lock)


def folder_of(recipe: Recipe, space: Space, *, new: bool = False) -> Path:
    """Where the search lies, or will lie."""
    name, number = space.settings.name or f"{recipe.name}-search", 1
    folder = recipe.output_dir / name
    while new and folder.exists():
        number += 1
        folder = recipe.output_dir / f"{name}-{number}"
    return folder


def is_known(recipe: Recipe, space: Space, *, new: bool = False) -> bool:
    """Whether it was begun before, so that its values have passed the gates."""
    return (folder_of(recipe, space, new=new) / RECORD).exists()


def described(space: Space) -> dict[str, Any]:
    """What the record keeps of a space."""
    return {"settings": space.settings.model_dump(mode="json"), "space": space.described()}


def refuse_another(folder: Path, recipe: Recipe, space: Space) -> None:
    """Earlier trials mean nothing where the recipe or the space is another.

    Raises:
        CheckpointError: the record cannot be read.
        RecipeError: says what differs.
    """
    try:
        before = json.loads((folder / RECORD).read_text())
        found = [f"recipe: {line}" for line in differing_keys(load_recipe(folder / SEARCHED), recipe)]
        settings, values = before["settings"], before["space"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(
            f"{folder / RECORD} cannot be read ({problem}): it is no search's record. Start anew beside it: --new."
        ) from problem
    now = described(space)
    found += [
        f"search.{key}: {shown(settings.get(key))} -> {shown(now['settings'][key])}"
        for key in FIXED
        if settings.get(key) != now["settings"][key]
    ]
    for key in {**values, **now["space"]}:
        changes = differences(values.get(key), now["space"].get(key), (key,))
        if lines := [f"space: {dotted_key}: {shown(old)} -> {shown(new)}" for dotted_key, old, new in changes]:
            found += lines
    if found:
        listing = "\n".join(f"  {line}" for line in found)
        raise RecipeError(
            f"{folder} belongs to another search. What differs (there -> here):\n{listing}\nPut it back, start anew"
            " beside it with --new, or give this search a name of its own: `search: {name: ...}`."
        )
