"""Open the recipe's sources, and check their files before a run."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path

from cpt.cache import key_of
from cpt.data.examples.encoder import encoder_of
from cpt.data.readers.columns import columns_named, columns_of
from cpt.data.readers.documents import BadRow, Document, Piece, complaint
from cpt.data.readers.filters import sieve_of, sift
from cpt.data.readers.sources import (
    files_of,
    find_function,
    kind_of,
    listing_of,
    read_piece,
    with_absolute_names,
)
from cpt.data.store.shards import ShardWork, plan_of
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource, reading_content
from cpt.distributed import is_main_process
from cpt.errors import CptError
from cpt.recipe.paths import format_of
from cpt.recipe.rules import keyed_sources, options_without_effect, reported_name
from cpt.recipe.schema import RETAIN_PRESETS, Data, DocumentSource, Evaluation, Source

log = logging.getLogger("cpt")
FILES_OPENED = 20  # per source; other files are checked by name and size only


def check_sources(data: Data, evaluation: Evaluation, *, ask_hub: bool = False) -> list[str]:
    """All problems with filters, files and their columns; imports neither torch nor transformers. `ask_hub` also
    checks Hub sources, by a listing and the first row of each."""
    keyed = keyed_sources(data, evaluation)
    return list(
        dict.fromkeys(
            each for key, source in keyed for each in check_source(data, source, key, ask_hub)
        )
    )


def unchecked_sources(data: Data, evaluation: Evaluation, *, ask_hub: bool = False) -> list[str]:
    unchecked = {"url": "remote"} if ask_hub else {"url": "remote", "hub": "Hub"}
    words = evaluation.retain.keys() & set(RETAIN_PRESETS)
    hints = {
        word: f", for `evaluation.retain: {word}`; without a network, write `python-prose`"
        for word in words
    }
    return [
        f"`{key}.path`: {source.path} ({unchecked[kind]}{hints.get(source.name or '', '')})"
        for key, source in keyed_sources(data, evaluation)
        if (kind := kind_of(source.path)) in unchecked
    ]


def check_source(data: Data, source: DocumentSource, key: str, ask_hub: bool) -> list[str]:
    kind = kind_of(source.path)
    try:
        functions = sieve_of(data, source, key).functions()
        columns_of(source)
        if kind == "function":
            find_function(source, key)
        files = files_of(source, key) if kind == "local" or kind == "hub" and ask_hub else []
    except CptError as problem:
        return [str(problem)]
    formats = {format_of(file.name) for file in files}
    written = source.model_copy(update={"chat": columns_named(source) or None})
    complaints = [
        f"`{key}.{option}` has no effect: {source.path} holds {', '.join(sorted(formats))} files. Remove it."
        for option in (options_without_effect(written, formats) if files else [])
    ]
    if kind == "hub":  # files may be large, so fetch only the first row
        files, source = files[:1], source.model_copy(update={"max_documents": 1})
    for number, file in enumerate(files):
        if number >= FILES_OPENED and file.size:
            continue
        try:
            first = next(read_piece(source, Piece(file.name), key), None)
            if isinstance(first, BadRow) and (first.loses_file or data.on_bad_row == "error"):
                complaints.append(complaint(first, key))
            elif (
                isinstance(first, Document) and number == 0
            ):  # also runs filters and transforms once
                list(sift(first, reported_name(source), *functions))
        except CptError as problem:
            complaints.append(str(problem))
    return complaints


def open_sources(
    data: Data,
    keyed: Mapping[str, DocumentSource],
    encoder: DocumentEncoder,
    cache_dir: Path,
    seed: int,
    held_out_share: float = 0.0,
) -> dict[str, TokenizedSource]:
    """Sources and held-out sets by their key in the recipe; nothing is read yet."""
    for key, source in keyed.items():  # report all errors before reading
        sieve_of(data, source, key).functions()
    return {
        key: open_source(data, source, key, encoder, cache_dir, seed, held_out_share)
        for key, source in keyed.items()
    }


def open_source(
    data: Data,
    source: DocumentSource,
    key: str,
    encoder: DocumentEncoder,
    cache_dir: Path,
    seed: int,
    held_out_share: float = 0.0,
) -> TokenizedSource:
    """Open one source; a held-out set is always one chunk.

    Args:
        held_out_share: share of a training source's documents that is held out.
    """
    encoder = encoder_of(source, encoder, key)
    sieve, listing = sieve_of(data, source, key), listing_of(source, key)
    states = with_absolute_names(listing.files)
    is_unknown = not states and source.revision is None
    if kind_of(source.path) == "hub" and is_unknown and is_main_process():
        log.warning(
            f"{source.path}: if this dataset changes on the Hub, its stored tokens are used unchanged. Pin it:"
            f" `{key}.revision`."
        )
    enough = source.max_tokens if isinstance(source, Source) and not states else None
    reading = reading_content(source, sieve)
    folder = (
        cache_dir
        / "tokens"
        / key_of({**reading, "tokenizer": encoder.fingerprint, "enough": enough})
    )
    is_trained = isinstance(source, Source)
    work = ShardWork(
        source,
        key,
        sieve,
        encoder,
        data.on_bad_row,
        folder,
        enough,
        held_out_share=held_out_share if is_trained else 1.0,
    )
    chunk_bytes = data.chunk_bytes if is_trained else sys.maxsize
    plan = plan_of(source, key, states, chunk_bytes=chunk_bytes, seed=seed)
    return TokenizedSource(work, plan, states, data.max_bad_share, listing.passed_over)
