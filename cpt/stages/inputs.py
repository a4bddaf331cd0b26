"""What a run reads, by hash: data, tokenizer and weights, for its record."""

from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from cpt.data.prepared import PreparedData
from cpt.models.hashes import hash_weights
from cpt.models.rules import is_local
from cpt.recipe.run_results import result_of_run
from cpt.recipe.schema import Recipe


def describe_inputs(recipe: Recipe, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Hashes of all that decides the run beside the recipe and the code."""
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
        "data": {"fingerprint": data.fingerprint, "tokens": data.num_tokens, "sources": sources},
        "tokenizer": {"path": tokenizer.name_or_path, "xxh3": xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode())},
        "weights": {
            "path": model.path,
            "revision": model.revision,
            "sha256": hash_weights(model.path, model.revision) if model.path is not None and not model.from_scratch else {},
        },
        **describe_teacher(recipe),
    }


def describe_teacher(recipe: Recipe) -> dict[str, Any]:
    """The model that a stage learns from; of one on the Hub, which is not here yet, the name alone."""
    path = result_of_run(recipe.training.get("teacher_model_name_or_path"))
    if path is None:
        return {}
    revision = recipe.training.get("teacher_model_revision")
    return {"teacher": {"path": path, "revision": revision, "sha256": hash_weights(path) if is_local(path) else {}}}
