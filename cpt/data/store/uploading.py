"""Bring what was prepared into the bucket: shards first, what lists them last, so that half an upload is not seen."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from cpt.data.prepared import PreparedData
from cpt.data.store.bucket import Bucket
from cpt.data.store.folder import cannot_keep
from cpt.data.store.shards import object_of
from cpt.data.store.source_description import manifest_of
from cpt.data.store.token_files import DESCRIPTION
from cpt.data.store.tokenized import TokenizedSource
from cpt.data.windows.rows import WindowedRows
from cpt.data.windows.table import TABLE, TOTAL

log = logging.getLogger("cpt")
AT_ONCE = 16


def upload(prepared: PreparedData, store: Bucket) -> int:
    """What the bucket does not have yet of a recipe's prepared data; gives the number of shards.

    Raises:
        ResourceError: the bucket refuses, or is not reached.
    """
    for rows in prepared.windowed:
        if rows.selection.repeated is not None and not store.has(
            name := f"duplicates/{rows.selection.repeated.folder.name}.tar"
        ):
            store.put_folder(rows.selection.repeated.folder, name)
    number = sum(
        upload_source(source, store) for source in (*prepared.judges, *(rows.tokenized for rows in prepared.windowed))
    )
    for rows in prepared.windowed:
        upload_rows(rows, store)
    return number


def upload_rows(rows: WindowedRows, store: Bucket) -> None:
    """The table of a source's windows, where all of them are known."""
    if (rows.folder / TABLE).exists():
        for file in (TABLE, TOTAL):
            store.write(f"rows/{rows.folder.name}/{file}", (rows.folder / file).read_bytes())


def upload_source(source: TokenizedSource, store: Bucket) -> int:
    """The shards that the bucket does not have, then the manifest; none of a source that is not complete."""
    if source.description is None or source.is_kept:
        return 0
    number = upload_shards(source, range(len(source.plan.shards)), store)
    store.write(manifest_of(source.folder), (source.folder / DESCRIPTION).read_bytes())
    return number


def upload_shards(source: TokenizedSource, numbers: Sequence[int], store: Bucket) -> int:
    """Those of these shards that are here and not there."""
    kept = store.names(f"tokens/{source.folder.name}")
    folders = [source.shard_folder(number) for number in numbers]
    new = [folder for folder in folders if f"{folder.name}.tar" not in kept]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(partial(upload_shard, store=store), new))
    return len(new)


def upload_shard(folder: Path, store: Bucket) -> None:
    """One shard, as one object."""
    try:
        store.put_folder(folder, object_of(folder.parent, folder.name))
    except OSError as problem:
        raise cannot_keep(folder.parent, problem) from problem
