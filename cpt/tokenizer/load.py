"""Load the tokenizer of a recipe: `tokenizer.path`, or the model's tokenizer."""

import json
import logging
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from cpt.cache import TOKENIZER, refuse_unreachable
from cpt.errors import RecipeError
from cpt.plugins import import_user_module
from cpt.recipe.paths import is_local, unfinished_run
from cpt.recipe.schema import Model, Tokenizer

logger = logging.getLogger(__name__)


def load_tokenizer(tokenizer: Tokenizer, model: Model) -> PreTrainedTokenizerBase:
    """Load the tokenizer at `tokenizer.path`, else at `model.path`. Adds no token; a missing pad token becomes the eos
    token. Raises RecipeError if loading fails, or if there is no fast version or no eos token."""
    path = tokenizer.path or model.path
    if path is None:
        raise RecipeError(
            "no tokenizer: the model is built from `model.config`, which lacks one. Set `tokenizer.path` to a local"
            " folder or a Hub id, or train one: cpt tokenizer train --text FILES --vocabulary 32000 --output FOLDER"
        )
    if model.import_ is not None:  # AutoTokenizer also reads the model's config
        import_user_module(model.import_)
    revision = tokenizer.revision or (model.revision if path == model.path else None)
    loaded = from_folder_or_hub(path, revision, model.trust_remote_code)
    if not loaded.is_fast:
        problem_of_tokenizer = (
            f"`{path}` has only a slow tokenizer ({type(loaded).__name__}, written in Python)"
        )
        raise RecipeError(
            f"{problem_of_tokenizer}. Set `tokenizer.path` to one with a tokenizer.json."
        )
    if loaded.eos_token_id is None:
        problem_of_tokenizer = f"the tokenizer of `{path}` lacks an eos token, which ends documents"
        raise RecipeError(f"{problem_of_tokenizer}. Set `eos_token` in its tokenizer_config.json.")
    if loaded.pad_token_id is None:
        loaded.pad_token = loaded.eos_token
        logger.info(
            f"the tokenizer of {path} lacks a pad token; using {loaded.eos_token} (padding is never learned)"
        )
    return loaded


def tokenizer_at(tokenizer: PreTrainedTokenizerBase | str | Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub, unless it is loaded already."""
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        return tokenizer
    return load_tokenizer(Tokenizer(path=str(tokenizer)), Model())


def from_folder_or_hub(
    path: str, revision: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Call AutoTokenizer, with errors that name the recipe's key."""
    local = Path(path).expanduser()
    complaint = unfinished_run(path)
    if complaint:
        raise RecipeError(f"`tokenizer.path`: {complaint}")
    if local.exists():
        check_folder(local)
        where = "local folder"
        path = str(local)
    elif is_local(path):
        raise RecipeError(f"no tokenizer folder `{path}` in {Path.cwd()}. Check `tokenizer.path`.")
    else:
        refuse_unreachable("`tokenizer.path`", path, revision, TOKENIZER)
        where = f"Hub id, as it is not a folder in {Path.cwd()}"
    try:
        return AutoTokenizer.from_pretrained(
            path, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError) as problem:
        reason = str(problem).strip().split("\n")[0] + " Check `tokenizer.path`."
        raise RecipeError(f"cannot load a tokenizer from `{path}` ({where}): {reason}") from problem


def check_folder(folder: Path) -> None:
    # The errors of transformers do not name the file.
    if not folder.is_dir():
        raise RecipeError(
            f"`{folder}` is a file. Set `tokenizer.path` to the folder with tokenizer.json."
        )
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "config.json",
    )
    if not any((folder / name).exists() for name in names):
        raise RecipeError(
            f"`{folder}` has no tokenizer, expected one of {', '.join(names)}. Check `tokenizer.path`."
        )
    for path in (folder / "tokenizer.json", folder / "tokenizer_config.json"):
        if path.exists():
            try:
                json.loads(path.read_bytes())
            except ValueError as problem:
                raise RecipeError(
                    f"`{path}` is damaged: {problem}. Copy or train it again."
                ) from problem
