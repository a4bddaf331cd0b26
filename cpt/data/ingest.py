"""Read, filter and tokenise a source once; later runs find its tokens in the store."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from xxhash import xxh3_64_intdigest, xxh3_128

from cpt.data.filters import Filter, FilterLists, build_filters, reason_to_drop, source_text
from cpt.data.sources import AnySource, Document, find_files, hash_file, is_local, open_source
from cpt.data.store import TokenStore, TokenWriter, key_of, publish_once
from cpt.data.tokenization import DocumentEncoder
from cpt.errors import DataError
from cpt.ranks import is_main_process
from cpt.recipe.sense import reported_name

log = logging.getLogger("cpt")
FORMAT = 1  # of the store; counts up when old folders must not be read
BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 4_000_000


def tokenize_source(source: AnySource, filters: FilterLists, encoder: DocumentEncoder, cache_dir: Path, key: str) -> TokenStore:
    """The source's tokens, made now or found in `cache_dir`.

    Args:
        filters: that its documents pass, with their places in the recipe.
        key: where the source stands in the recipe, for messages: `data.sources[0]`.
    """
    checks = build_filters(filters)
    states = file_states(source, key)
    if not states and source.revision is None and is_main_process():
        log.warning(f"{source.path}: once stored, its tokens are used even if it changes on the Hub. Pin it: `{key}.revision`.")

    def fill(folder: Path) -> None:
        files = {name: hash_file(Path(name), key) for name, *_ in states}
        writer = TokenWriter(folder, encoder.dtype)
        text_digest = xxh3_128()
        dropped: Counter[str] = Counter()
        for batch in batches(keep(show_progress(open_source(source, key), reported_name(source)), checks, reported_name(source), dropped)):
            raws = [document.text.encode() for document in batch]
            text_digest.update(b"\0".join(raws))
            ids, lengths = encoder.encode([document.text for document in batch])
            writer.append(ids, lengths, [xxh3_64_intdigest(raw) for raw in raws], [len(raw) for raw in raws])
        if not writer.hashes:
            raise DataError(nothing_left(source, key, dropped))
        if file_states(source, key) != states:
            raise DataError(f"{source.path}: files changed while they were being read. Start again when they are complete ({key}.path).")
        writer.close(dict(dropped), files or {f"{source.path}@{source.revision or 'main'}": text_digest.hexdigest()})

    content = {
        "format": FORMAT,
        "files": states,
        "hub": None if states else [source.path, source.subset, source.split, source.revision],
        "text_column": source.text_column,
        "max_documents": source.max_documents,
        "filters": [
            [component.name, component.options, source_text(component.name)] for components in filters.values() for component in components
        ],
        "tokenizer": encoder.fingerprint,
    }
    return TokenStore(publish_once(cache_dir / "tokens" / key_of(content), fill))


def file_states(source: AnySource, key: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of each file of a local source: equal states, equal content."""
    if not is_local(source.path):
        return []
    return [(str(file.absolute()), file.stat().st_size, file.stat().st_mtime_ns) for file in find_files(source, key)]


def keep(documents: Iterator[Document], checks: Sequence[Filter], name: str, dropped: Counter[str]) -> Iterator[Document]:
    """The documents that every filter lets pass; the others are counted by reason."""
    for document in documents:
        reason = reason_to_drop({"text": document.text, "source": name, "where": document.where}, checks)
        if reason is None:
            yield document
        else:
            dropped[reason] += 1


def batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups large enough to keep all cores busy, small enough for the memory."""
    for first in documents:
        batch, characters = [first], len(first.text)
        while characters < BATCH_CHARACTERS and len(batch) < BATCH_DOCUMENTS and (document := next(documents, None)) is not None:
            batch.append(document)
            characters += len(document.text)
        yield batch


def nothing_left(source: AnySource, key: str, dropped: Counter[str]) -> str:
    """Why a source gives no document at all."""
    if not dropped:
        return f"{source.path}: no documents. Set `{key}.path`."
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
    what = f"{source.path}: all {dropped.total():,} documents were dropped ({reasons})."
    return f"{what} Loosen `data.filters` or `{key}.filters`, or set another `{key}.path`."


def show_progress(documents: Iterator[Document], name: str) -> Iterator[Document]:
    """Count on the terminal, of the main process only, while documents pass."""
    columns: list[Any] = [SpinnerColumn(), TextColumn("tokenising {task.description}: {task.completed:,} documents"), TimeElapsedColumn()]
    with Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not (is_main_process() and sys.stderr.isatty())
    ) as progress:
        task = progress.add_task(name, total=None)
        for document in documents:
            yield document
            progress.advance(task)
