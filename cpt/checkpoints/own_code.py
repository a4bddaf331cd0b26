"""A model whose code is the user's: imported by its name or by the recipe of its run, and refused where nobody did."""

from pathlib import Path

from transformers import CONFIG_MAPPING

from cpt.checkpoints.model_folder import config_json, kind_of
from cpt.checkpoints.proof import brings_its_code
from cpt.errors import CheckpointError
from cpt.extend import import_user_module
from cpt.recipe.load import load_recipe
from cpt.runs.folder import RECIPE

NAME_IT = "Name the module that registers it: --import package.module"


def import_own_code(folder: Path, module: str | None) -> None:
    """Import what `--import` names, or the recipe of the run that the folder is, or is the model of.

    Raises:
        RecipeError: it cannot be imported.
    """
    run = next(
        (one for one in (folder, folder.parent) if (one / RECIPE).is_file() and kind_of(one) == "nothing"), None
    )
    if module is None and run is not None:
        module = load_recipe(run / RECIPE).model.import_
    if module is not None:
        import_user_module(module)


def refuse_unknown_code(folder: Path) -> None:
    """Where a model's family is the user's own, its module must have been imported.

    Raises:
        CheckpointError: it was not.
    """
    if brings_its_code(folder) and config_json(folder).get("model_type") not in CONFIG_MAPPING:
        raise CheckpointError(f"{folder} is of a family that transformers does not know. {NAME_IT}")
