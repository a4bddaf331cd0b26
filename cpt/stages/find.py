"""Find the module of a stage by its name in the recipe."""

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from cpt.errors import RecipeError, ResourceError
from cpt.extend import did_you_mean, import_user_module
from cpt.recipe.huggingface_keys import STAGE_CONFIGS

STAGES: Mapping[str, str] = {name: f"cpt.stages.{name}" for name in STAGE_CONFIGS}
PARTS = ("CONFIG", "COLUMNS", "build_trainer")


def find_stage(name: str) -> ModuleType:
    """The module of a stage: a built-in one, or the user's `package.module`.

    Raises:
        RecipeError: there is none, or it lacks one of CONFIG, COLUMNS, build_trainer.
        ResourceError: TRL has no such trainer in the installed version.
    """
    if name in STAGES:
        try:
            return import_module(STAGES[name])
        except ImportError as problem:
            if not str(problem.name or "").startswith("trl"):
                raise
            raise ResourceError(
                f"`stage`: `{name}` needs a trainer that the installed trl {version('trl')} does not have ({problem})."
                " Install one that has it: pip install 'trl==1.16.*'"
            ) from problem
    if "." not in name:
        raise RecipeError(
            f"`stage`: no stage called `{name}`.{did_you_mean(name, STAGES)} Built in: {', '.join(STAGES)}. Your own:"
            " `package.module`."
        )
    module: ModuleType = import_user_module(name)
    missing = [part for part in PARTS if part not in vars(module)]
    if missing:
        raise RecipeError(
            f"`stage`: `{name}` lacks {', '.join(missing)}. A stage is a module with {', '.join(PARTS)}."
        )
    return module
