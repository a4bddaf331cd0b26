"""What a run reads, by hash: data, tokenizer and weights, for its record."""

from typing import Any

import xxhash
from transformers import PreTrainedTokenizerBase

from cpt.data.build import PreparedData
from cpt.models.hashes import hash_weights
from cpt.recipe.schema import Recipe


def describe_inputs(recipe: Recipe, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Hashes of all that decides the run beside the recipe and the code."""
    sources = {
        source.name: {"documents": source.documents, "tokens": source.tokens, "dropped": source.dropped, "files": source.files}
        for source in data.sources
    }
    starts_from_weights = recipe.model.path is not None and not recipe.model.from_scratch
    return {
        "data": {"fingerprint": data.fingerprint, "tokens": data.num_tokens, "sources": sources},
        "tokenizer": {"path": tokenizer.name_or_path, "xxh3": xxhash.xxh3_128_hexdigest(tokenizer.backend_tokenizer.to_str().encode())},
        "weights": {
            "path": recipe.model.path,
            "revision": recipe.model.revision,
            "sha256": hash_weights(recipe.model.path, recipe.model.revision) if starts_from_weights else {},
        },
    }
