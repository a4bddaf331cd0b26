"""The recipe as it is rehearsed: the same model, data, batch, optimizer and profile; saved when the rehearsal says so,
told to nobody."""

from pathlib import Path
from typing import Any

from cpt.recipe.schema import Checkpoints, Component, Recipe

# where the weights alone are published too, if the recipe ever does that; the step before it has a full checkpoint
STEP_OF_WEIGHTS = 3
QUESTIONS = 2  # of each task
NOT_REHEARSED = ("push_to_hub", "logging_first_step", "logging_strategy", "logging_steps")


def rehearsed(recipe: Recipe, folder: Path, name: str, **safety: Any) -> Recipe:
    """The recipe of one rehearsed run.

    Its budget, and so its schedule and its data, stay those of the run: the rehearsal only ends early.

    Args:
        folder: of rehearsed runs.
        safety: what else the run does about faults.
    """
    saves = {"every_tokens": None, "every_steps": None, "keep": Checkpoints().keep, "archive": None, "average": None}
    weights = STEP_OF_WEIGHTS if recipe.checkpoints.weights_every_steps else None
    evaluation: dict[str, Any] = {
        "every_tokens": None,
        "every_steps": None,
        "retain": dict.fromkeys(recipe.evaluation.retain),
    }
    evaluation |= {
        "prompts": recipe.evaluation.prompts[:1],
        "tasks": [shortened(task) for task in recipe.evaluation.tasks],
    }
    training = {key: value for key, value in recipe.training.items() if key not in NOT_REHEARSED}
    return recipe.model_copy(
        update={
            "name": name,
            "output_dir": folder,
            "checkpoints": recipe.checkpoints.model_copy(update={**saves, "weights_every_steps": weights}),
            "evaluation": recipe.evaluation.model_copy(update=evaluation),
            "monitoring": recipe.monitoring.model_copy(update={"trackers": []}),
            "safety": recipe.safety.model_copy(update=safety),
            "training": {**training, "logging_steps": 1},
        }
    )


def shortened(task: Component) -> Component:
    """A few questions of it."""
    key = "questions" if task.name == "domain_test" else "limit"
    asked = task.options.get(key)
    fewer = min(QUESTIONS, asked) if isinstance(asked, int) else QUESTIONS
    return type(task).model_validate({"name": task.name, **task.options, key: fewer})
