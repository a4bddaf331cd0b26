"""The config of a `model:` section without opening weights, its rotary positions, and the sha256 of its weight files
for the run's record."""

import dataclasses
import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
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
from cpt.models.families import FAMILIES, CptGPT2Config, register_families
from cpt.plugins import did_you_mean, import_user_module
from cpt.recipe.paths import is_local, unfinished_run
from cpt.recipe.schema import Model

# Keys of published config.json files that transformers renames or merges into others when it reads them.
ROPE_KEYS = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
LEGACY_KEYS = ROPE_KEYS | {"hybrid_override_pattern", "torch_dtype"}
UNDECLARED_KEYS = {
    "head_dim",
    "num_hidden_layers",
}  # models read them, though not every config class declares them
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
    written = None if model.config is None else config_from(model.config)
    if model.from_scratch and written is not None:
        return written
    path = str(model.path)
    if Path(path).suffix in STATE_DICTS:
        if not Path(path).expanduser().is_file():
            raise RecipeError(f"model.path: {path} does not exist (current folder: {Path.cwd()}).")
        if written is None:
            raise RecipeError(
                f"model.path: {path} is a bare state dict. Give its shape in model.config."
            )
        return written
    found = read_config(model)
    if written is None or model.config is None:
        return found
    if (text := found.get_text_config()).model_type == written.model_type:
        found = text  # the language model of weights that also read images
    if (
        written.model_type in FAMILIES
        and found.model_type in FAMILIES[written.model_type].starts_from
    ):
        if (
            found.model_type == "minimind"
        ):  # its config.json has other names; the shape must fit the weights
            return written
        values = {
            field.name: value_of(found, field.name) for field in dataclasses.fields(type(found))
        }
        if isinstance(written, CptGPT2Config):
            rows = max(written.vocab_size, found.vocab_size)
            values |= {"unpadded_vocab_size": found.vocab_size, "vocab_size": rows}
            values |= {
                name: vars(written)[name] for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")
            }
        found = type(written)(**values | {"architectures": None})
    # Only keys in the recipe are compared.
    names = {"rope_parameters" if key in ROPE_KEYS else key for key in model.config} - {
        "torch_dtype",
        "architectures",
    }
    differing = [
        f"  {name}: {value_of(written, name)} in model.config, {value_of(found, name)} in {path}"
        for name in sorted(names)
        if value_of(written, name) != value_of(found, name)
    ]
    if differing:
        raise RecipeError(
            f"model.config does not match the shape of {path}:\n"
            + "\n".join(differing)
            + "\nCorrect or remove model.config (if it comes from a `base:`, name another file there), or write "
            + "`model.from_scratch: true` for new weights of that shape."
        )
    return found


def config_from(written: Mapping[str, Any]) -> PreTrainedConfig:
    register_families()
    values = dict(written)
    model_type = values.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        known = [*FAMILIES, *CONFIG_MAPPING.keys()]
        raise RecipeError(
            f"model.config.model_type: unknown architecture `{model_type}`.{did_you_mean(model_type, known)} Use one"
            f" of transformers' (llama, qwen3, ...), {', '.join(FAMILIES)}, or a custom one with `model.import`."
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
        folder = Path(path).expanduser()
        if not folder.exists():
            raise RecipeError(
                f"model.path: {path} does not exist. Use a model's folder or a Hub id."
            )
        complaint = unfinished_run(path)
        if complaint:
            raise RecipeError(f"model.path: {complaint}")
        if (
            folder.is_dir()
            and (folder / "adapter_config.json").is_file()
            and not (folder / "config.json").is_file()
        ):
            merge = f"cpt merge --method lora BASE {path} --output FOLDER"
            raise RecipeError(
                f"model.path: {path} is an adapter without its base. Merge both: {merge}"
            )
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise RecipeError(
                f"model.path: {path} lacks config.json. Use a folder written by save_pretrained."
            )
        path = str(folder)
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


def with_rope(config: PreTrainedConfig, wanted: Mapping[Any, Any]) -> PreTrainedConfig:
    """Set the rotary positions of `model.rope` in the config, in place; exported models include them.

    YaRN (arXiv 2309.00071) keeps the resolution of near tokens and compresses far positions by `factor`; a larger base
    (`theta`) slows all rotations (arXiv 2309.16039). Both need training on long rows.
    """
    text = config.get_text_config()
    found = text.to_dict().get("rope_parameters")
    if not isinstance(found, dict) or "rope_type" not in found:
        reason = (
            "has different positions per kind of layer"
            if found
            else "does not use rotary positions"
        )
        raise RecipeError(
            f"`model.rope`: {config.model_type} {reason}, so this key cannot change them. Remove it."
        )
    if not wanted:
        raise RecipeError(
            "`model.rope` is empty: write `theta: 1e6`, or `{type: yarn, factor: 8}`, or remove it."
        )
    if ("type" in wanted) != ("factor" in wanted):
        raise RecipeError(
            "`model.rope`: `type` and `factor` go together, such as `{type: yarn, factor: 8}`."
        )
    original = int(found.get("original_max_position_embeddings") or text.max_position_embeddings)
    rope = {
        name: found[name]
        for name in ("rope_theta", "rope_type", "partial_rotary_factor")
        if name in found
    }
    if "theta" in wanted:
        rope["rope_theta"] = float(wanted["theta"])
    length = int(wanted.get("length") or text.max_position_embeddings)
    if "type" in wanted:
        factor = float(wanted["factor"])
        rope |= {
            "rope_type": wanted["type"],
            "factor": factor,
            "original_max_position_embeddings": original,
        }
        length = int(wanted.get("length") or original * factor)
        if length > original * factor:
            raise RecipeError(
                f"`model.rope.length` {length:,} needs a larger `factor` than {factor:g}."
            )
    elif found["rope_type"] != "default":
        rope = {**found, **rope}
    text.rope_parameters = rope
    text.max_position_embeddings = length
    return config


# --- weight files ----------------------------------------------------------------------------------------------------

WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.pt")
CONFIGS = ("config.json", "generation_config.json")
EXTENSION = "extension.json"  # the added tokens, saved with the weights of an extended model
TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.*", "vocab.*", "merges.txt"),
)
MODEL_FILES = (*CONFIGS, *TOKENIZER_FILES, "*.py", EXTENSION)
"""Files of a model folder besides weights and training state."""


def hash_weights(path: str, revision: str | None = None) -> dict[str, str]:
    """Return file name -> sha256 of each weight file of a local folder or file, or of the cached Hub snapshot."""
    place = weights_folder(path, revision)
    files = (
        [place]
        if place.is_file()
        else sorted({file for pattern in WEIGHTS for file in place.glob(pattern)})
    )
    return sha256_of({file.name: file for file in files})


def weights_folder(path: str, revision: str | None = None) -> Path:
    if is_local(path):
        return Path(path).expanduser()
    config = try_to_load_from_cache(path, "config.json", revision=revision)
    if not isinstance(config, str):
        raise CheckpointError(
            f"{path} is neither a folder nor in the Hub cache of this machine. To download it: hf download {path}"
        )
    return Path(config).parent


def sha256_of(files: Mapping[str, Path]) -> dict[str, str]:
    def digest(file: Path) -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=4) as pool:  # hashlib releases the GIL
        return dict(zip(files, pool.map(digest, files.values()), strict=True))
