"""Tokenise a source once, on all cores; later runs find its tokens in the store, and one that was killed goes on where it was."""

import json
import logging
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from cpt.data.bad_rows import FILE_NAME, Listed, OnBadRow, refuse_too_many, write_bad_rows
from cpt.data.components import ComponentLists, module_text
from cpt.data.filters import FilterLists, build_filters, source_text
from cpt.data.parallel import map_in_order, num_workers
from cpt.data.shards import Shard, Shards, ShardWork, sample, shards_of
from cpt.data.sources import hash_file, kind_of, states_of
from cpt.data.store import FORMAT, TokenStore, TokenWriter, key_of, publish_once
from cpt.data.tokenization import DocumentEncoder
from cpt.data.transforms import build_transforms, transform_content
from cpt.errors import DataError, RecipeError
from cpt.ranks import is_main_process
from cpt.recipe.schema import DocumentSource
from cpt.recipe.sense_data import reported_name

Result = TypeVar("Result")
log = logging.getLogger("cpt")
POOL_BYTES = 32 * 2**20  # of files; below, starting processes takes longer than the work
WORKERS_IMPORT = ("cpt.data.shards", "gigatoken")
PROOF_BYTES = 2**20  # below, proving gigatoken takes longer than doing without
NO_TRANSFORMS: ComponentLists = {}
# What changes how documents are used, and not their tokens.
NEUTRAL = {"path", "name", "weight", "filters", "transforms"}


def tokenize_source(
    source: DocumentSource,
    filters: FilterLists,
    encoder: DocumentEncoder,
    cache_dir: Path,
    key: str,
    *,
    transforms: ComponentLists = NO_TRANSFORMS,
    on_bad_row: OnBadRow = "error",
    max_bad_share: float = 1.0,
    workers: int | None = None,
) -> TokenStore:
    """The source's tokens, made now or found in `cache_dir`.

    Args:
        filters, transforms: that its documents pass, with their places in the recipe.
        key: where the source stands in the recipe, for messages: `data.sources[0]`.
        workers: processes that share the work; 0 for none but this one. By default CPT_WORKERS or the number of cores, for a source large
            enough. What is stored does not depend on it.

    Raises:
        DataError: nothing is there, a row is bad, or too many are, or none is left.
        RecipeError: a filter or transform does not exist, or refuses its options.
        ResourceError: the cache cannot be written, or a worker died.
    """
    build_filters(filters), build_transforms(transforms)  # wrong ones are told before anything is read
    states = states_of(source, key)
    tell_unpinned(source, key)
    folder = cache_dir / "tokens" / key_of(key_content(source, states, filters, transforms, encoder, on_bad_row, max_bad_share))
    shards_folder = folder.with_name(folder.name + ".shards")
    work = ShardWork(source, key, filters, transforms, encoder, on_bad_row, shards_folder)

    def fill(unfinished: Path) -> None:
        shards_folder.mkdir(exist_ok=True)
        try:
            hashes = beside(lambda: {name: hash_file(name, key) for name, *_ in states})  # the workers read the same files: little cost
            shards = shards_of(source, key, is_file=bool(states))
            with closing(make_shards(work, shards, workers, are_files=bool(states))) as made:
                put_together(work, made, unfinished, hashes, max_bad_share)
            if states_of(source, key) != states:
                what = f"{source.path}: files changed while they were being read."
                raise DataError(f"{what} Start again when they are complete ({key}.path).")
        except (DataError, RecipeError):  # the shards would not be used again
            shutil.rmtree(shards_folder, ignore_errors=True)
            raise

    publish_once(folder, fill)
    shutil.rmtree(shards_folder, ignore_errors=True)
    return TokenStore(folder)


def key_content(
    source: DocumentSource,
    states: Sequence[tuple[str, int, str]],
    filters: FilterLists,
    transforms: ComponentLists,
    encoder: DocumentEncoder,
    on_bad_row: OnBadRow,
    max_bad_share: float,
) -> dict[str, Any]:
    """All that decides the tokens; how they are found (workers, gigatoken) is not among it, for they are the same."""
    return {
        "format": FORMAT,
        "files": states,
        "not_files": None if states else source.path,
        "code": module_text("source", source.path, {}) if kind_of(source.path) == "function" else None,
        "source": source.model_dump(exclude=NEUTRAL),
        "bad_rows": [on_bad_row, max_bad_share],
        "filters": [[one.name, one.options, source_text(one.name)] for components in filters.values() for one in components],
        "transforms": transform_content(transforms),
        "tokenizer": encoder.fingerprint,
    }


def beside(function: Callable[[], Result]) -> "Future[Result]":
    """What a function gives, worked out in a thread that nobody waits for when the rest fails."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as problem:  # whoever waits gets it
            future.set_exception(problem)

    Thread(target=run, daemon=True).start()
    return future


def tell_unpinned(source: DocumentSource, key: str) -> None:
    """Say which sources may change unseen."""
    if kind_of(source.path) == "hub" and source.revision is None and is_main_process():
        log.warning(f"{source.path}: once stored, its tokens are used even if it changes on the Hub. Pin it: `{key}.revision`.")


def prepared(work: ShardWork, shards: Shards, are_files: bool) -> ShardWork:
    """The work with the fastest encoder that gives the same ids, where it pays to look for one."""
    if not are_files:
        return replace(work, prove_on_the_way=True)
    if sum(shards.num_bytes) < PROOF_BYTES:
        return work
    return replace(work, encoder=work.encoder.proven_for(sample(work.source, shards.shards, work.key)))


def make_shards(work: ShardWork, shards: Shards, workers: int | None, *, are_files: bool) -> Generator[Shard, None, None]:
    """Every shard, in order, once it is there; those that an earlier run left behind are not made again."""
    is_missing = [not work.folder_of(shard).exists() for shard in shards.shards]
    missing = [shard for shard, needed in zip(shards.shards, is_missing, strict=True) if needed]
    if workers is None:
        large = sum(size for size, needed in zip(shards.num_bytes, is_missing, strict=True) if needed) >= POOL_BYTES
        workers = num_workers() if large else 0
    made = map_in_order(lambda: prepared(work, shards, are_files), missing, workers if len(missing) > 1 else 0, WORKERS_IMPORT)
    with progress_bar(reported_name(work.source), sum(shards.num_bytes)) as (progress, task):
        for shard, size, needed in zip(shards.shards, shards.num_bytes, is_missing, strict=True):
            if needed:
                next(made)
            yield shard
            progress.advance(task, size)


def put_together(work: ShardWork, shards: Iterator[Shard], folder: Path, hashes: "Future[dict[str, str]]", max_bad_share: float) -> None:
    """One store of all shards, in order, so that each document is found by its number."""
    writer = TokenWriter(folder, work.encoder.dtype)
    dropped, bad_rows, longest, bad, engines, texts = Counter[str](), Counter[str](), ("", 0), list[Listed](), dict[str, None](), ""
    for shard in shards:
        part = sound(work, shard)
        writer.copy(part)
        dropped.update(part.description.dropped)
        bad_rows.update(part.description.bad_rows)
        longest = max(longest, part.description.longest, key=lambda place: place[1])
        bad += read_bad_rows(part.folder)
        engines[part.description.made_from["engine"]] = None
        texts = part.description.made_from["texts"]
    source = work.source
    refuse_too_many(bad, writer.num_documents + dropped.total(), max_bad_share, source.path, work.key)
    if not writer.num_documents:
        raise DataError(nothing_left(source, work.key, dropped))
    if bad:
        write_bad_rows(bad, folder)
    made_from = {"source": source.path, "tokenizer": work.encoder.name, "engine": ", ".join(engines)}
    files = hashes.result() or {f"{source.path}@{source.revision or 'main'}": texts}
    writer.close(dropped, files, bad_rows=bad_rows, longest=longest, made_from=made_from)


def sound(work: ShardWork, shard: Shard) -> TokenStore:
    """A shard that is what was written; a power cut may have left another, which is made again."""
    folder = work.folder_of(shard)
    for _ in range(2):
        try:
            store = TokenStore(folder)
            if store.digest() == store.description.digest:
                return store
        except DataError:
            pass
        shutil.rmtree(folder, ignore_errors=True)
        work(shard)
    raise DataError(f"{folder}: what is written there does not come back the same. Is the disk failing? Set CPT_CACHE to another.")


def read_bad_rows(folder: Path) -> Iterator[Listed]:
    """The bad rows of a shard."""
    file = folder / FILE_NAME
    if file.exists():
        yield from map(json.loads, file.read_text(encoding="utf-8").splitlines())


def nothing_left(source: DocumentSource, key: str, dropped: Counter[str]) -> str:
    """Why a source gives no document at all."""
    if not dropped:
        return f"{source.path}: no documents. Set `{key}.path`."
    reasons = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
    what = f"{source.path}: all {dropped.total():,} documents were dropped ({reasons})."
    return f"{what} Loosen `data.filters` or `{key}.filters`, or set another `{key}.path`."


@contextmanager
def progress_bar(name: str, num_bytes: int) -> Iterator[tuple[Progress, TaskID]]:
    """How far it is, on the terminal of the main process only."""
    columns: list[Any] = [
        TextColumn("tokenising {task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    hidden = not (is_main_process() and sys.stderr.isatty())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        yield progress, progress.add_task(name, total=num_bytes or None)
