"""Convert files and folders of documents into jsonl that a recipe's source reads; started again, only what is new is
converted."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpt.data.readers.opening import format_of
from cpt.data.store.parallel import map_in_order, num_workers
from cpt.documents.convert import FileConverter
from cpt.documents.kinds import SUFFIXES, find_documents
from cpt.documents.output import DUPLICATE, Entry, OutputFolder, open_output

BATCH_FILES = 512  # whose texts are in memory together
MEMORY_BYTES = 4 * 2**30


@dataclass
class Ingested:
    """What `ingest` did."""

    folder: Path
    failed_file: Path
    num_shards: int = 0  # in the folder, those of earlier runs included
    passed_over: Counter[str] = field(default_factory=Counter)  # suffix -> files in folders that are no documents
    num_known: int = 0  # files that an earlier run has converted or listed
    new: dict[str, Counter[str]] = field(
        default_factory=dict
    )  # by kind: files, documents, pages, characters, duplicates, failed
    misnamed: int = 0  # new documents of another kind than their suffix says
    failed: list[Entry] = field(default_factory=list)  # of the inputs, those without a document, now or before


def ingest(
    inputs: Sequence[Path],
    output: Path,
    *,
    max_seconds: float = 120.0,
    shard_mb: int = 64,
    retry_failed: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Ingested:
    """Convert what is new among the inputs, and add it to the output folder.

    A file that cannot be converted is listed. The bytes do not depend on the number of workers (CPT_WORKERS), nor on
    interruptions.

    Args:
        max_seconds: time limit of a file's conversion.
        shard_mb: a file of the output is complete when it has this many megabytes; a document is never cut.
        retry_failed: try files again that an earlier run could not convert.
        tell: called with the number of files that are done, and of all.

    Raises:
        DataError: an input does not exist.
        ResourceError: the output folder cannot be written.
        LaunchError: another process writes there.
    """
    files, passed_over = find_documents(inputs, output)
    names = {path: str(path).encode("utf-8", "backslashreplace").decode() for path in files}
    with open_output(output, shard_mb * 10**6) as folder:
        todo = [path for path in files if is_to_do(path, folder.entries.get(names[path]), folder, retry_failed)]
        done = Ingested(output, folder.failed_file, passed_over=passed_over, num_known=len(files) - len(todo))
        again = {names[path] for path in todo}
        holders = {
            str(one.sha256): one.path
            for one in folder.entries.values()
            if one.shard is not None and one.path not in again
        }
        for number, (entry, row) in enumerate(convert_all(todo, holders, max_seconds), 1):
            record(entry, row, folder, holders, done)
            tell(number, len(todo))
        folder.finish()
        done.num_shards = len(folder.shard_files())
        entries = [folder.entries[name] for name in names.values()]
        done.failed = [entry for entry in entries if entry.reason not in (None, DUPLICATE)]
    return done


def is_to_do(path: Path, entry: Entry | None, folder: OutputFolder, retry_failed: bool) -> bool:
    """True for a file that is new, has changed, or is the duplicate of one that has changed."""
    if entry is None or (retry_failed and entry.reason is not None):
        return True
    if entry.reason == DUPLICATE and not is_unchanged(Path(str(entry.detail)), folder.entries.get(str(entry.detail))):
        return True
    return not is_unchanged(path, entry)


def is_unchanged(path: Path, entry: Entry | None) -> bool:
    """True for a file that is as it was, or was removed: its document stays."""
    try:
        found = path.stat()
    except OSError:
        return True
    return entry is not None and (entry.size, entry.mtime_ns) == (found.st_size, found.st_mtime_ns)


def convert_all(
    paths: Sequence[Path], holders: dict[str, str], seconds: float
) -> Iterator[tuple[Entry, dict[str, Any] | None]]:
    """What became of each file, in order. There is always a worker process: only a process without threads may
    fork."""
    for start in range(0, len(paths), BATCH_FILES):
        batch = paths[start : start + BATCH_FILES]
        prepare = partial(FileConverter, seconds, MEMORY_BYTES, frozenset(holders))
        yield from map_in_order(prepare, batch, min(len(batch), max(1, num_workers())))


def record(
    entry: Entry, row: dict[str, Any] | None, folder: OutputFolder, holders: dict[str, str], done: Ingested
) -> None:
    """Write a document, or why there is none, and count it."""
    counts = done.new.setdefault(entry.kind or "unknown", Counter())
    before, sha256 = folder.entries.get(entry.path), str(entry.sha256)
    counts["files"] += 1
    if sha256 in holders:
        counts["duplicates"] += 1
        folder.record(replace(entry, reason=DUPLICATE, detail=holders[sha256]))
    elif row is None:
        counts["failed"] += 1
        folder.record(entry)
    elif (
        before is not None and before.shard is not None and before.sha256 == sha256
    ):  # nothing but its time has changed
        folder.record(replace(entry, shard=before.shard))
    else:
        folder.record(entry, row)
        counts.update(documents=1, pages=row.get("pages", 0), characters=len(row["text"]))
        done.misnamed += SUFFIXES.get(format_of(entry.path)) != entry.kind
    if row is not None:
        holders.setdefault(sha256, entry.path)
