"""The config of a `model:` section without opening weights, its rotary positions, and the sha256 of its weight files
for the run's record."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from cpt.cache import refuse_unreachable
from cpt.errors import CheckpointError, RecipeError, ResourceError
from cpt.files import hashes_of, sha256_of
from cpt.models.families import FAMILIES, CptGPT2Config, register_families
from cpt.plugins import did_you_mean, import_user_module
from cpt.recipe.paths import is_local, unfinished_run
from cpt.recipe.schema import Model

# Keys of published config.json files that transformers renames or merges into others when it reads them.
ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
LEGACY_KEYS = ROPE_KEYS | {"hybrid_override_pattern", "torch_dtype"}
# Models read them, though not every config class declares them.
UNDECLARED_KEYS = {"head_dim", "num_hidden_layers"}
STATE_DICTS = (".pth", ".pt")


def load_config(model: Model) -> PreTrainedConfig:
    register_families()
    if model.import_ is not None:
        import_user_module(model.import_)
    config = _resolve(model)
    if model.rope is not None:
        config = with_rope(config, model.rope.model_dump(exclude_none=True))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not model.trust_remote_code:
        raise RecipeError(
            f"model: `{config.model_type}` is not a causal language model. Choose one."
        )
    return config


def _resolve(model: Model) -> PreTrainedConfig:
    recipe_config = None if model.config is None else config_from(model.config)
    if model.from_scratch and recipe_config is not None:
        return recipe_config
    path = str(model.path)
    if Path(path).suffix in STATE_DICTS:
        if not Path(path).expanduser().is_file():
            raise RecipeError(f"model.path: {path} does not exist (current folder: {Path.cwd()}).")
        if recipe_config is None:
            raise RecipeError(
                f"model.path: {path} is a bare state dict. Give its shape in model.config."
            )
        return recipe_config
    published = read_config(model)
    if recipe_config is None or model.config is None:
        return published
    text = published.get_text_config()
    if text.model_type == recipe_config.model_type:
        published = text  # the language model of weights that also read images
    family = FAMILIES.get(recipe_config.model_type)
    if family is not None and published.model_type in family.starts_from:
        if published.model_type == "minimind":
            return recipe_config  # its config.json has other names; the shape must fit the weights
        published = _as_family(published, recipe_config)
    _refuse_another_shape(model.config, recipe_config, published, path)
    return published


def _as_family(published: PreTrainedConfig, recipe_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the published config as one of our family, with what only the recipe can say."""
    names = [field.name for field in dataclasses.fields(type(published))]
    values = {name: value_of(published, name) for name in names}
    if isinstance(recipe_config, CptGPT2Config):
        values["unpadded_vocab_size"] = published.vocab_size
        values["vocab_size"] = max(recipe_config.vocab_size, published.vocab_size)
        for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            values[name] = vars(recipe_config)[name]
    values["architectures"] = None
    return type(recipe_config)(**values)


def _refuse_another_shape(
    keys: Iterable[str], recipe_config: PreTrainedConfig, published: PreTrainedConfig, path: str
) -> None:
    """Compare the keys in the recipe's `model.config`, and no others, with the published config."""
    names = set(keys) - {"torch_dtype", "architectures"}
    if names & ROPE_KEYS:
        names = names - ROPE_KEYS | {"rope_parameters"}
    differences = []
    for name in sorted(names):
        in_recipe = value_of(recipe_config, name)
        in_path = value_of(published, name)
        if in_recipe != in_path:
            differences.append(f"  {name}: {in_recipe} in model.config, {in_path} in {path}")
    if differences:
        raise RecipeError(
            f"model.config does not match the shape of {path}:\n"
            + "\n".join(differences)
            + "\nCorrect or remove model.config (if it comes from a `base:`, name another file there), or write "
            + "`model.from_scratch: true` for new weights of that shape."
        )


def config_from(section: Mapping[str, Any]) -> PreTrainedConfig:
    """Build the config that a recipe's `model.config` describes."""
    register_families()
    values = dict(section)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        model_types = [*FAMILIES, *CONFIG_MAPPING.keys()]
        raise RecipeError(
            f"model.config.model_type: unknown architecture `{model_type}`.{did_you_mean(model_type, model_types)} Use"
            f" one of transformers' (llama, qwen3, ...), {', '.join(FAMILIES)}, or a custom one with `model.import`."
        )
    config_class = CONFIG_MAPPING[model_type]
    # transformers accepts any key without a warning, so a typo would leave the default. A custom class may accept
    # other keys.
    if dataclasses.is_dataclass(config_class) and config_class.__module__.startswith(
        ("transformers.", "cpt.")
    ):
        keys = {field.name for field in dataclasses.fields(config_class)}
        keys |= {*config_class.attribute_map, *LEGACY_KEYS, *UNDECLARED_KEYS}
        for key in values:
            if key not in keys:
                raise RecipeError(
                    f"model.config.{key} is not a key of `{model_type}`.{did_you_mean(key, keys)}"
                )
    try:
        return AutoConfig.for_model(model_type, **values)
    except (StrictDataclassError, TypeError, ValueError, KeyError) as problem:
        raise RecipeError(
            f"model.config ({model_type}): {' '.join(str(problem).split())}"
        ) from problem


def read_config(model: Model) -> PreTrainedConfig:
    """Read the config.json of the folder or Hub id; ResourceError if the Hub is unreachable or needs a login."""
    path = str(model.path)
    if is_local(path):
        _check_model_path(path)
        path = str(Path(path).expanduser())
    else:
        refuse_unreachable("model.path", path, model.revision)
    try:
        revision = model.revision or "main"
        return AutoConfig.from_pretrained(
            path, revision=revision, trust_remote_code=model.trust_remote_code
        )
    except OSError as problem:
        if is_local(path):
            raise RecipeError(
                f"model.path: {' '.join(str(problem).split())[:300]} Copy it again."
            ) from problem
        raise _hub_error(path, problem) from problem
    except (ValueError, KeyError, StrictDataclassError) as problem:
        reason = str(problem).split("\n")[0]
        raise RecipeError(
            f"model.path: the config.json of {path} cannot be read: {reason} If its code comes with the weights, set"
            " model.trust_remote_code and model.revision; for your own code, set `model.import`."
        ) from problem


def _check_model_path(path: str) -> None:
    """Refuse a local path without a model."""
    folder = Path(path).expanduser()
    if not folder.exists():
        raise RecipeError(f"model.path: {path} does not exist. Use a model's folder or a Hub id.")
    complaint = unfinished_run(path)
    if complaint:
        raise RecipeError(f"model.path: {complaint}")
    if not folder.is_dir() or (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        merge = f"cpt merge --method lora BASE {path} --output FOLDER"
        raise RecipeError(f"model.path: {path} is an adapter without its base. Merge both: {merge}")
    raise RecipeError(
        f"model.path: {path} lacks config.json. Use a folder written by save_pretrained."
    )


def _hub_error(path: str, problem: OSError) -> RecipeError | ResourceError:
    cause: BaseException | None = problem
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    if isinstance(cause, GatedRepoError):
        return ResourceError(
            f"model.path: {path} is gated. Accept its licence on the Hub, then run: hf auth login"
        )
    if isinstance(cause, RepositoryNotFoundError):
        return RecipeError(
            f"model.path: {path} is neither a folder nor on the Hub (if private: hf auth login)."
        )
    reason = " ".join(str(problem).split())[:300]
    return ResourceError(
        f"model.path: no config.json of {path} on the Hub: {reason} Try: hf download {path}"
    )


def value_of(config: PreTrainedConfig, name: str) -> Any:
    """Get a config's value by its name or an alias, which only attribute access resolves; None if missing."""
    return getattr(config, name, None)


def with_rope(config: PreTrainedConfig, changes: Mapping[Any, Any]) -> PreTrainedConfig:
    """Set the rotary positions of `model.rope` in the config, in place; exported models include them.

    YaRN (arXiv 2309.00071) keeps the resolution of near tokens and compresses far positions by `factor`; a larger base
    (`theta`) slows all rotations (arXiv 2309.16039). Both need training on long rows.
    """
    text = config.get_text_config()
    published = text.to_dict().get("rope_parameters")
    if not isinstance(published, dict) or "rope_type" not in published:
        reason = "does not use rotary positions"
        if published:
            reason = "has different positions per kind of layer"
        raise RecipeError(
            f"`model.rope`: {config.model_type} {reason}, so this key cannot change them. Remove it."
        )
    if not changes:
        raise RecipeError(
            "`model.rope` is empty: write `theta: 1e6`, or `{type: yarn, factor: 8}`, or remove it."
        )
    if ("type" in changes) != ("factor" in changes):
        raise RecipeError(
            "`model.rope`: `type` and `factor` go together, such as `{type: yarn, factor: 8}`."
        )
    original = int(
        published.get("original_max_position_embeddings") or text.max_position_embeddings
    )
    rope = dict(published)
    if "type" in changes or published["rope_type"] == "default":
        names = ("rope_theta", "rope_type", "partial_rotary_factor")
        rope = {name: published[name] for name in names if name in published}
    if "theta" in changes:
        rope["rope_theta"] = float(changes["theta"])
    length = int(changes.get("length") or text.max_position_embeddings)
    if "type" in changes:
        factor = float(changes["factor"])
        rope |= {
            "rope_type": changes["type"],
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        length = int(changes.get("length") or original * factor)
        if length > original * factor:
            raise RecipeError(
                f"`model.rope.length` {length:,} needs a larger `factor` than {factor:g}."
            )
    text.rope_parameters = rope
    text.max_position_embeddings = length
    return config


# --- weight files ----------------------------------------------------------------------------------------------------

WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt")
CONFIGS = ("config.json", "generation_config.json")
EXTENSION = "extension.json"  # the added tokens, saved with the weights of an extended model
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.*",
    "merges.txt",
)
MODEL_FILES = (*CONFIGS, *TOKENIZER_FILES, "*.py", EXTENSION)
"""Files of a model folder besides weights and training state."""


def hash_weights(path: str, revision: str | None = None) -> dict[str, str]:
    """Return file name -> sha256 of each weight file of a local folder or file, or of the cached Hub snapshot."""
    location = weights_folder(path, revision)
    files = {location}
    if not location.is_file():
        files = set[Path]()
        for pattern in WEIGHTS:
            files.update(location.glob(pattern))
    return hashes_of({file.name: file for file in sorted(files)}, sha256_of)


def weights_folder(path: str, revision: str | None = None) -> Path:
    if is_local(path):
        return Path(path).expanduser()
    config = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(config, str):
        raise CheckpointError(
            f"{path} is neither a folder nor in the Hub cache of this machine. To download it: hf download {path}"
        )
    return Path(config).parent
