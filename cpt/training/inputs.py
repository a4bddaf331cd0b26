"""The inputs of a run: its data, and the hashes of data, tokenizer and weights for its record."""

from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase, TrainingArguments

from cpt.data.readers.columns import form_of_stage
from cpt.data.rows.build import PreparedData, build_data
from cpt.models.build import DTYPES
from cpt.models.config import hash_weights
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.keys import AUTOMATIC
from cpt.recipe.paths import is_local, result_of_run
from cpt.recipe.schema import Recipe
from cpt.training.arguments import weights_dtype
from cpt.training.engine_profiles import read_profile


def data_of(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreparedData:
    """All that the recipe's run reads.

    Raises:
        CptError: see `build_data`.
    """
    return build_data(
        phases_in_tokens(recipe),
        tokenizer,
        seed=recipe.seed,
        evaluation=recipe.evaluation,
        budget=recipe.budget,
        form=form_of_stage(recipe.stage),
    )


def describe_inputs(
    recipe: Recipe, data: PreparedData, tokenizer: PreTrainedTokenizerBase, arguments: TrainingArguments
) -> dict[str, Any]:
    """Hashes of all inputs except the recipe and the code, and the values chosen where the recipe left it
    open."""
    sources = {
        source.name: {
            "documents": source.documents,
            "held_out": source.held_out,
            "tokens": source.tokens,
            "share": source.share,
            "licence": source.licence,
            "is_estimate": source.is_estimate,
            "dropped": source.dropped,
            "files": source.files,
        }
        for source in data.sources
    }
    model = recipe.model
    return {
        "data": {
            "fingerprint": data.fingerprint,
            "tokens": data.num_tokens,
            "sources": sources,
            "held_out": data.held_out_files,
        },
        "tokenizer": {"path": tokenizer.name_or_path, "xxh3": hash_of_tokenizer(tokenizer)},
        "weights": {
            "path": model.path,
            "revision": model.revision,
            "sha256": hash_weights(model.path, model.revision)
            if model.path is not None and not model.from_scratch
            else {},
            "dtype": str(DTYPES.get(model.dtype, weights_dtype(recipe, arguments))).removeprefix("torch."),
        },
        "training": chosen_values(recipe, arguments),
        **describe_teacher(recipe),
    }


def hash_of_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str:
    """xxh3-128 of all that decides ids."""
    return xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode())


def chosen_values(recipe: Recipe, arguments: TrainingArguments) -> dict[str, Any]:
    """What this start put in the place of `auto`, and what a step consists of; of a DeepSpeed profile its content."""
    profile = arguments.deepspeed
    return {
        **{key: recipe.training[key] for key in AUTOMATIC if key in recipe.training},
        "per_device_train_batch_size": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "deepspeed": read_profile(profile) if profile else None,
    }


def describe_teacher(recipe: Recipe) -> dict[str, Any]:
    """The model that a stage learns from; of one on the Hub, which is not here yet, the name alone."""
    path = result_of_run(recipe.training.get("teacher_model_name_or_path"))
    if path is None:
        return {}
    revision = recipe.training.get("teacher_model_revision")
    return {"teacher": {"path": path, "revision": revision, "sha256": hash_weights(path) if is_local(path) else {}}}
