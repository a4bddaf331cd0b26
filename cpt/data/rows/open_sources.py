"""Open the recipe's sources, and check their files before a run."""

import logging
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from cpt.cache import key_of
from cpt.data.examples.encoder import encoder_of
from cpt.data.readers.columns import columns_named, columns_of
from cpt.data.readers.documents import BadRow, Document, File, Piece, complaint
from cpt.data.readers.filters import sieve_of, sift
from cpt.data.readers.sources import (
    cut_files,
    files_of,
    find_function,
    kind_of,
    listing_of,
    read_piece,
    with_absolute_names,
)
from cpt.data.store.file_states import stored_files
from cpt.data.store.shards import ShardWork, TextChecks, plan_of
from cpt.data.store.text_loss import check_text_loss, evenly_spaced, spelled_warnings
from cpt.data.store.tokenization import DocumentEncoder
from cpt.data.store.tokenized import TokenizedSource, reading_content
from cpt.distributed import is_main_process
from cpt.errors import CptError
from cpt.recipe.paths import format_of
from cpt.recipe.rules import keyed_sources, options_without_effect, reported_name
from cpt.recipe.schema import RETAIN_PRESETS, Data, DocumentSource, Evaluation, Source

log = logging.getLogger("cpt")
FILES_OPENED = 20  # per source; other files are checked by name and size only
SAMPLED_DOCUMENTS = 128  # per source; an excerpt of each is compared
SAMPLED_CHARACTERS = 4_000_000  # at most, that are read for them
SMALLEST_PIECE = 16 * 2**10


def check_sources(data: Data, evaluation: Evaluation, *, ask_hub: bool = False) -> list[str]:
    """All problems with filters, files and their columns; imports neither torch nor transformers. `ask_hub` also
    checks Hub sources, by a listing and the first row of each."""
    complaints: dict[str, None] = {}  # in order, each once
    for key, source in keyed_sources(data, evaluation):
        complaints.update(dict.fromkeys(check_source(data, source, key, ask_hub)))
    return list(complaints)


def unchecked_sources(data: Data, evaluation: Evaluation, *, ask_hub: bool = False) -> list[str]:
    reported_kinds = {"url": "remote"} if ask_hub else {"url": "remote", "hub": "Hub"}
    presets = evaluation.retain.keys() & set(RETAIN_PRESETS)
    unchecked = []
    for key, source in keyed_sources(data, evaluation):
        kind = kind_of(source.path)
        if kind not in reported_kinds:
            continue
        hint = ""
        if source.name in presets:
            hint = (
                f", for `evaluation.retain: {source.name}`; without a network, write `python-prose`"
            )
        unchecked.append(f"`{key}.path`: {source.path} ({reported_kinds[kind]}{hint})")
    return unchecked


def check_source(data: Data, source: DocumentSource, key: str, ask_hub: bool) -> list[str]:
    kind = kind_of(source.path)
    files: Sequence[File] = []
    try:
        functions = sieve_of(data, source, key).functions()
        columns_of(source)
        if kind == "function":
            find_function(source, key)
        if kind == "local" or kind == "hub" and ask_hub:
            files = files_of(source, key)
    except CptError as problem:
        return [str(problem)]
    complaints = complain_of_options(source, key, files) if files else []
    if kind == "hub":  # files may be large, so fetch only the first row
        files = files[:1]
        source = source.model_copy(update={"max_documents": 1})
    for number, file in enumerate(files):
        if number >= FILES_OPENED and file.size:  # opening an empty one is cheap
            continue
        try:
            first = next(read_piece(source, Piece(file.name), key), None)
            if isinstance(first, BadRow) and (first.loses_file or data.on_bad_row == "error"):
                complaints.append(complaint(first, key))
            elif isinstance(first, Document) and number == 0:
                list(sift(first, reported_name(source), *functions))  # may raise, too
        except CptError as problem:
            complaints.append(str(problem))
    return complaints


def complain_of_options(source: DocumentSource, key: str, files: Sequence[File]) -> list[str]:
    """The options of a source that have no effect on files of these formats."""
    formats = {format_of(file.name) for file in files}
    with_columns = source.model_copy(update={"chat": columns_named(source) or None})
    complaints = []
    for option in options_without_effect(with_columns, formats):
        complaints.append(
            f"`{key}.{option}` has no effect: {source.path} holds {', '.join(sorted(formats))} files. Remove it."
        )
    return complaints


def compare_sample(
    data: Data, source: DocumentSource, key: str, encoder: DocumentEncoder
) -> list[str]:
    """Warnings of what a tokenizer does not give back of a sample of a local source, and of special tokens in it;
    RecipeError above `data.max_text_loss`."""
    if kind_of(source.path) != "local":
        return []
    encoder = encoder_of(source, encoder, key)
    functions = sieve_of(data, source, key).functions()
    texts: list[str] = []
    documents: list[Document] = []  # of each text
    for document in sampled_documents(source, key):
        for text, reason in sift(document, reported_name(source), *functions):
            if reason is None and encoder.reason_to_drop(text) is None:
                texts.append(text)
                documents.append(document)
    if not texts:
        return []
    raw = [text.encode() for text in texts]
    hashes = np.ones(len(texts), np.uint64)  # above a share of 0: none is held out
    checks = TextChecks(encoder, held_out_share=0.0, first_excerpts=SAMPLED_DOCUMENTS)
    checks.add(texts, raw, hashes, documents)
    name = f"`{key}.path`: {reported_name(source)}"
    where = f"a sample of {len(texts):,} texts"
    return [
        *spelled_warnings(name, checks.spelled.counts, checks.spelled_at, where),
        *check_text_loss(name, encoder.name, checks.compare(), data.max_text_loss),
    ]


def sampled_documents(source: DocumentSource, key: str) -> list[Document]:
    """About `SAMPLED_DOCUMENTS` documents of a local source, at equal distances in the bytes of its files."""
    files = files_of(source, key)
    sizes = {file.name: file.size for file in files}
    piece_bytes = max(sum(sizes.values()) // SAMPLED_DOCUMENTS, SMALLEST_PIECE)
    pieces = cut_files(files, source, piece_bytes)
    num_bytes = np.array([(piece.stop or sizes[piece.path]) - piece.start for piece in pieces])
    jobs = [[piece] for piece in pieces]
    if source.max_documents is not None:  # counted from the first one
        jobs = [pieces]
        num_bytes = num_bytes.sum(keepdims=True)
    sample: list[Document] = []
    # A piece without the beginning of a document or row group is empty; then others give more.
    for _ in range(2):
        sample.clear()
        if not num_bytes.any():
            break
        positions = evenly_spaced(SAMPLED_DOCUMENTS, int(num_bytes.sum()))
        job_of_position = np.searchsorted(num_bytes.cumsum(), positions, side="right")
        numbers, counts = np.unique(job_of_position, return_counts=True)
        for number, count in zip(numbers, counts, strict=True):
            documents = some_documents(source, jobs[number], key, int(count))
            if not documents:
                num_bytes[number] = 0
            sample += documents
        if len(sample) >= SAMPLED_DOCUMENTS // 2:
            break
    return sample


def some_documents(
    source: DocumentSource, pieces: Sequence[Piece], key: str, count: int
) -> list[Document]:
    """Documents at equal distances in the first ones of some pieces; few characters are read for few documents."""
    rows = chain.from_iterable(read_piece(source, piece, key) for piece in pieces)
    documents: list[Document] = []
    characters = 0
    for row in islice(rows, source.max_documents):
        if isinstance(row, Document):
            documents.append(row)
            characters += len(row.text)
        if characters * SAMPLED_DOCUMENTS >= count * SAMPLED_CHARACTERS:
            break
    numbers = evenly_spaced(min(count, len(documents)), len(documents))
    return [documents[number] for number in numbers.tolist()]


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
    opened = {}
    for key, source in keyed.items():
        opened[key] = open_source(data, source, key, encoder, cache_dir, seed, held_out_share)
    return opened


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
    sieve = sieve_of(data, source, key)
    listing = listing_of(source, key)
    is_unknown = not listing.files and source.revision is None
    if kind_of(source.path) == "hub" and is_unknown and is_main_process():
        log.warning(
            f"{source.path}: if this dataset changes on the Hub, its stored tokens are used unchanged. Pin it:"
            f" `{key}.revision`."
        )
    is_trained = isinstance(source, Source)
    enough_tokens = source.max_tokens if isinstance(source, Source) and not listing.files else None
    decides = {
        **reading_content(source, sieve),
        "tokenizer": encoder.fingerprint,
        "enough": enough_tokens,
    }
    folder = cache_dir / "tokens" / key_of(decides)
    work = ShardWork(
        source=source,
        key=key,
        sieve=sieve,
        encoder=encoder,
        on_bad_row=data.on_bad_row,
        folder=folder,
        enough_tokens=enough_tokens,
        held_out_share=held_out_share if is_trained else 1.0,
    )
    plan = plan_of(
        source,
        key,
        with_absolute_names(listing.files),
        chunk_bytes=data.chunk_bytes if is_trained else sys.maxsize,
        seed=seed,
    )
    like = key_of({**decides, "path": None})
    stored = stored_files(folder, like, plan.shards, listing.files)
    return TokenizedSource(work, plan, stored, data.max_bad_share, listing.passed_over)
