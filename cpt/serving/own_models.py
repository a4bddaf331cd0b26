"""A model whose code is the user's, for Hugging Face's server, which looks for a class by its name in transformers and nowhere else."""

from pathlib import Path

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cpt.checkpoints.model_folder import kind_of
from cpt.extend import import_user_module
from cpt.recipe.load import load_recipe
from cpt.runs.record import RECIPE


def import_own_code(folder: Path, module: str | None) -> None:
    """Import what `--import` names, or the recipe of the run that the folder is, or is the model of.

    Raises:
        RecipeError: it cannot be imported.
    """
    run = next((one for one in (folder, folder.parent) if (one / RECIPE).is_file() and kind_of(one) == "nothing"), None)
    name = module or (load_recipe(run / RECIPE).model.import_ if run is not None else None)
    if name is not None:
        import_user_module(name)


def can_be_served(architecture: str) -> bool:
    """Whether the server will find the class: transformers' own, or one that is registered with AutoModelForCausalLM.

    The server of transformers 5.23 takes `getattr(transformers, architecture)` (cli/serving/model_manager.py), so a registered one is put
    there.
    """
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    registered = {found.__name__: found for found in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()}  # values() imports all models
    if architecture not in registered:
        return False
    setattr(transformers, architecture, registered[architecture])
    return True
