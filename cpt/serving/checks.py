"""Is this a model that Hugging Face's server can load? Asked before it tries."""

import socket
from dataclasses import dataclass
from pathlib import Path

import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.import_utils import is_serve_available

from cpt.checkpoints.model_folder import Tensors, config_json, kind_of
from cpt.errors import CheckpointError, LaunchError, RecipeError, ResourceError
from cpt.export.proof import brings_its_code
from cpt.export.trained import NAME_IT, TOKENIZER_FILES, import_own_code
from cpt.models.config import read_config
from cpt.models.families import FAMILIES
from cpt.recipe.schema import Model
from cpt.runs.record import EXPORT, RECIPE, Run


@dataclass(frozen=True)
class Servable:
    """A model as Hugging Face's server is told of it."""

    name: str
    """Folder or Hub id; requests must say the same in `model`."""
    has_chat_template: bool


def check_servable(model: str, module: str | None = None) -> Servable:
    """A folder's files, one by one, or that the Hub's cache has the id; of a finished run its exported model.

    Args:
        module: the user's own `package.module` that registers the model's family; by default that of the run's recipe.

    Raises:
        CheckpointError: the folder is no complete model, or an adapter, or in a format that only this package reads.
        ResourceError: the id cannot be found, or the packages for serving are missing.
    """
    if not is_serve_available():
        raise ResourceError("serving needs fastapi, uvicorn and openai. Install them: pip install 'cpt[serving]'")
    folder = Path(model).expanduser()
    name = str(check_folder(folder, module)) if folder.is_dir() else check_hub_id(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:  # damaged files
        reason = " ".join(str(problem).split())[:300]
        raise CheckpointError(
            f"{name}: cannot load its tokenizer: {reason} Copy the tokenizer's files again."
        ) from problem
    return Servable(name, tokenizer.chat_template is not None)


def check_folder(folder: Path, module: str | None = None) -> Path:
    """The folder to serve: itself, or a finished run's model."""
    if (folder / RECIPE).is_file() and kind_of(folder) == "nothing":
        if not Run(folder).is_finished:
            raise CheckpointError(
                f"{folder} is a run without a finished model. Export a checkpoint of it: cpt export {folder} --output"
                " FOLDER"
            )
        folder = folder / EXPORT
    if "@" in str(folder) or str(folder).endswith(".gguf"):
        raise CheckpointError(
            f"{folder}: Hugging Face's server takes `@` for the beginning of a revision. Rename the folder."
        )
    kind = kind_of(folder)
    if kind == "adapter":
        raise CheckpointError(
            f"{folder} is a LoRA adapter, which Hugging Face's server does not load. Merge it into its base first: "
            f"cpt export {folder} --output FOLDER"
        )
    if kind != "model" or not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} is not a complete model. Export one: cpt export RUN_OR_CHECKPOINT --output FOLDER"
        )
    Tensors(folder)  # opens each file, so that one that is missing or cut short is found now
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(f"{folder} has no tokenizer: copy tokenizer.json and tokenizer_config.json into it.")
    model_type = config_json(folder).get("model_type")
    if model_type in FAMILIES:
        raise CheckpointError(
            f"{folder} is a checkpoint of `{model_type}`, which only cpt reads. Export it as the architecture that it"
            f" equals: cpt export {folder} --output FOLDER"
        )
    check_architecture(folder, module)
    return folder


def check_architecture(folder: Path, module: str | None = None) -> None:
    """Hugging Face's server takes the class that config.json names, and nothing else."""
    architectures = config_json(folder).get("architectures") or ["(none named)"]
    if module is not None or not can_be_served(architectures[0]):
        import_own_code(folder, module)
    if not can_be_served(architectures[0]):
        remedy = (
            NAME_IT
            if brings_its_code(folder)
            else "Export the model with cpt export, or install the version of transformers that knows it."
        )
        raise CheckpointError(
            f"{folder}: config.json names {architectures[0]}, no causal language model of transformers"
            f" {transformers.__version__}. {remedy}"
        )


def can_be_served(architecture: str) -> bool:
    """Whether the server will find the class: transformers' own, or one that is registered with AutoModelForCausalLM.

    The server of transformers 5.23 takes `getattr(transformers, architecture)` (cli/serving/model_manager.py), so a
    registered one is put there.
    """
    if architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return True
    # Not values(), which imports all models.
    registered = {found.__name__: found for found in MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.values()}
    if architecture not in registered:
        return False
    setattr(transformers, architecture, registered[architecture])
    return True


def check_hub_id(model: str) -> str:
    """An id whose files are here or can be fetched."""
    if Path(model).expanduser().exists():
        raise CheckpointError(f"{model} is a file. Give the folder of an exported model.")
    try:
        validate_repo_id(model)
    except HFValidationError as problem:
        raise CheckpointError(
            f"{model} is neither a folder (looked in {Path.cwd()}) nor an id of the Hub. Give one of the two."
        ) from problem
    try:
        read_config(Model(path=model))
    except (RecipeError, ResourceError) as problem:
        raise type(problem)(str(problem).replace("model.path: ", "")) from problem
    return model


def check_port(host: str, port: int) -> None:
    """Refuse a port that is taken before a model is loaded for minutes."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as problem:
        raise LaunchError(
            f"cannot listen on {host}:{port}: {problem.strerror}. Choose another --host or --port."
        ) from problem
