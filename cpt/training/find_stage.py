"""Find a stage by its name in the recipe: its config class and its columns, and the trainer of a user's stage."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

from transformers import Trainer

from cpt.errors import RecipeError, ResourceError
from cpt.plugins import did_you_mean, import_user_module
from cpt.recipe.huggingface_keys import BUILT_IN_COLUMNS, STAGE_CONFIGS

PARTS = ("CONFIG", "COLUMNS", "build_trainer")


@dataclass(frozen=True)
class Stage:
    """A stage, built in or the user's."""

    CONFIG: Any
    COLUMNS: tuple[str, ...]
    build_trainer: Callable[..., Trainer] | None = None
    """Of a user's stage."""


def find_stage(name: str) -> Stage:
    """The stage: a built-in one, or the user's `package.module`.

    Raises:
        RecipeError: the module does not exist, or lacks one of CONFIG, COLUMNS, build_trainer.
        ResourceError: TRL has no such trainer in the installed version.
    """
    if name in STAGE_CONFIGS:
        return Stage(load_class(STAGE_CONFIGS[name], name), BUILT_IN_COLUMNS[name])
    if "." not in name:
        raise RecipeError(
            f"`stage`: no stage called `{name}`.{did_you_mean(name, STAGE_CONFIGS)} Built in:"
            f" {', '.join(STAGE_CONFIGS)}. Your own: `package.module`."
        )
    module = import_user_module(name)
    missing = [part for part in PARTS if part not in vars(module)]
    if missing:
        raise RecipeError(
            f"`stage`: `{name}` lacks {', '.join(missing)}. A stage is a module with {', '.join(PARTS)}."
        )
    return Stage(module.CONFIG, tuple(module.COLUMNS), build_trainer=module.build_trainer)


def load_class(path: str, stage: str) -> Any:
    """The class `package.module:Class` of a built-in stage.

    Raises:
        ResourceError: TRL has no such class in the installed version.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as problem:
        if "trl" not in f"{problem.name} {problem}":
            raise
        raise ResourceError(
            f"`stage`: `{stage}` needs a class that the installed trl {version('trl')} does not have ({problem})."
            " Install one that has it: pip install 'trl==1.16.*'"
        ) from problem
