"""All of what a recipe's run will read, or one worker's share of it."""

import logging
from pathlib import Path

from cpt.data.build import build_data
from cpt.data.form_of_stage import form_of_stage
from cpt.data.prepared import PreparedData
from cpt.data.store.bucket import bucket
from cpt.data.store.shares import Done, Share, make_share
from cpt.data.store.uploading import upload
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.schema import Recipe
from cpt.tokenizer.load import load_tokenizer

log = logging.getLogger("cpt")


def prepare_recipe(recipe: Recipe, cache_dir: Path | None = None) -> PreparedData:
    """Fill the store with all that the recipe's run will read, and the bucket, if there is one; where
    `data.disk_bytes` bounds the store, with what the run begins with."""
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.model)
    prepared = build_data(
        phases_in_tokens(recipe),
        tokenizer,
        seed=recipe.seed,
        evaluation=recipe.evaluation,
        form=form_of_stage(recipe.stage),
        budget=recipe.budget,
        cache_dir=cache_dir,
        whole=recipe.data.disk_bytes is None,
    )
    if (store := bucket()) is not None:
        log.info(f"{upload(prepared, store):,} shards brought to {store.url}.")
    return prepared


def prepare_share(recipe: Recipe, share: Share, cache_dir: Path | None = None) -> Done:
    """Make one worker's share of the shards."""
    return make_share(
        phases_in_tokens(recipe),
        load_tokenizer(recipe.tokenizer, recipe.model),
        share,
        seed=recipe.seed,
        evaluation=recipe.evaluation,
        cache_dir=cache_dir,
        form=form_of_stage(recipe.stage),
    )
