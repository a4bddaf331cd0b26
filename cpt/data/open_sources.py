"""From a source of the recipe to its place in the store, where its tokens are or will be."""

import logging
from pathlib import Path

from cpt.data.checking.files import filters_of, keyed_sources, transforms_of
from cpt.data.encoders import encoder_of
from cpt.data.filters import build_filters
from cpt.data.plan import plan_of
from cpt.data.sources import kind_of, states_of
from cpt.data.store.folder import key_of
from cpt.data.store.shards import ShardWork
from cpt.data.store.tokenized import TokenizedSource, key_content, order_of
from cpt.data.tokenization import DocumentEncoder
from cpt.data.transforms import build_transforms
from cpt.ranks import is_main_process
from cpt.recipe.schema import Data, DocumentSource, Evaluation, Source

log = logging.getLogger("cpt")


def open_sources(
    data: Data, evaluation: Evaluation, encoder: DocumentEncoder, cache_dir: Path, seed: int
) -> dict[str, TokenizedSource]:
    """Every source and held-out set by its place in the recipe; nothing is read yet.

    Raises:
        DataError: a source is not there.
        RecipeError: a filter or transform does not exist, or refuses its options.
        ResourceError: a server cannot be reached, or the store cannot be written.
    """
    keyed = list(keyed_sources(data, evaluation))
    for key, source in keyed:  # wrong ones are told before anything is looked at
        build_filters(filters_of(data, source, key)), build_transforms(transforms_of(data, source, key))
    return {key: open_source(data, source, key, encoder, cache_dir, seed) for key, source in keyed}


def open_source(
    data: Data, source: DocumentSource, key: str, encoder: DocumentEncoder, cache_dir: Path, seed: int
) -> TokenizedSource:
    """One of them; a held-out set is always one window."""
    encoder = encoder_of(source, encoder, key)
    filters = {**filters_of(data, source, key), f"{key}.chat": encoder.filters()}
    transforms, states = transforms_of(data, source, key), states_of(source, key)
    tell_unpinned(source, key, are_files=bool(states))
    enough = source.max_tokens if isinstance(source, Source) and not states else None
    folder = cache_dir / "tokens" / key_of({**key_content(source, filters, transforms, encoder), "enough": enough})
    work = ShardWork(source, key, filters, transforms, encoder, data.on_bad_row, folder, enough)
    plan = plan_of(
        source,
        key,
        states,
        window_bytes=data.window_bytes if isinstance(source, Source) else None,
        seed=seed,
        ordered=order_of(source) is not None,
    )
    return TokenizedSource(work, plan, states, data.max_bad_share)


def tell_unpinned(source: DocumentSource, key: str, *, are_files: bool) -> None:
    """Say which sources may change between two starts of a run, unseen or not."""
    if kind_of(source.path) == "hub" and source.revision is None and is_main_process():
        then = "a run could not go on" if are_files else "its stored tokens would be used unchanged"
        log.warning(f"{source.path}: if it changes on the Hub, {then}. Pin it: `{key}.revision`.")
