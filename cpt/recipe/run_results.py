"""Another run's folder where a recipe names a model: it means what that run came to."""

import json
from pathlib import Path

from cpt.recipe.schema import Recipe

RECIPE, STATUS, EXPORT = "recipe.yaml", "status.json", "final"
"""Files of a run's folder, and the folder of the model that it came to."""


def with_results_of_runs(recipe: Recipe) -> Recipe:
    """The recipe with the export of each finished run in the place of the run's folder, for the model and for the
    tokenizer."""
    model = recipe.model.model_copy(update={"path": result_of_run(recipe.model.path)})
    tokenizer = recipe.tokenizer.model_copy(update={"path": result_of_run(recipe.tokenizer.path)})
    return recipe.model_copy(update={"model": model, "tokenizer": tokenizer})


def result_of_run(path: str | None) -> str | None:
    """The exported model of a finished run; any other path as it is."""
    if path is None or not is_run(path) or unfinished_run(path):
        return path
    return str(Path(path) / EXPORT)


def is_run(path: str) -> bool:
    """Whether it is the folder of a run."""
    folder = Path(path).expanduser()
    return (folder / RECIPE).is_file() and not (folder / "config.json").is_file()


def unfinished_run(path: str) -> str | None:
    """What to say of a run that has no model to go on from yet; None for all other paths."""
    if not is_run(path):
        return None
    folder = Path(path).expanduser()
    try:
        state = json.loads((folder / STATUS).read_text()).get("state", "unknown")
    except (FileNotFoundError, ValueError, AttributeError):  # not there, or damaged
        state = "not started"
    if state == "finished" and (folder / EXPORT / "config.json").is_file():
        return None
    how = "has lost its model" if state == "finished" else f"has not finished (its state: {state})"
    return (
        f"{path} is a run that {how}. Let it end: cpt train {Path(path) / RECIPE}; or name one of its checkpoints:"
        f" {path}/checkpoint-N."
    )
