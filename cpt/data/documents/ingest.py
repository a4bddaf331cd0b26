"""Convert files and folders of documents into jsonl that a recipe's source reads. A second run converts only new
files."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpt.data.documents.convert import FileConverter
from cpt.data.documents.kinds import SUFFIXES, find_documents
from cpt.data.documents.output import DUPLICATE, JournalEntry, OutputFolder
from cpt.data.readers.opening import format_of
from cpt.data.store.parallel import map_in_order, num_workers
from cpt.files import output_locked

BATCH_FILES = 256  # whose texts are in memory together, and make one file of the output
MEMORY_BYTES = 4 * 2**30


@dataclass
class Ingested:
    folder: Path
    failed_file: Path
    num_shards: int = 0  # in the folder, those of earlier runs included
    passed_over: Counter[str] = field(default_factory=Counter)  # suffix -> files in folders that are no documents
    num_known: int = 0  # files that an earlier run has converted or listed
    num_changed: int = 0  # of these, files that have changed since
    new: dict[str, Counter[str]] = field(
        default_factory=dict
    )  # by kind: files, documents, pages, characters, duplicates, failed
    misnamed: int = 0  # new documents of another kind than their suffix says
    failed: list[JournalEntry] = field(default_factory=list)  # of the inputs, those without a document, now or before


def ingest(
    inputs: Sequence[Path],
    output: Path,
    *,
    max_seconds: float = 120.0,
    retry_failed: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Ingested:
    """Convert the new files among the inputs, and add them to the output folder.

    A file that cannot be converted is listed. A file that has changed since it was converted keeps its old text. The
    bytes do not depend on the number of workers (CPT_WORKERS), nor on interruptions.

    Args:
        max_seconds: time limit of a file's conversion.
        retry_failed: try files again that an earlier run could not convert.
        tell: called with the number of files that are done, and of all.

    Raises:
        DataError: an input does not exist.
        ResourceError: the output folder cannot be written.
        LaunchError: another process writes there.
    """
    files, passed_over = find_documents(inputs, output)
    names = {path: str(path).encode("utf-8", "backslashreplace").decode() for path in files}
    with output_locked(output, output / ".ingest/lock", "cpt data ingest"):
        folder = OutputFolder(output)
        known = {path: folder.entries[name] for path, name in names.items() if name in folder.entries}
        changed = {path for path, entry in known.items() if has_changed(path, entry)}
        again = {path for path, entry in known.items() if entry.reason and (retry_failed or path in changed)}
        todo = [path for path in files if path not in known or path in again]
        done = Ingested(output, folder.failed_file, passed_over=passed_over, num_known=len(files) - len(todo))
        done.num_changed = len(changed - again)
        holders = {str(one.sha256): one.path for one in folder.entries.values() if one.shard is not None}
        for start in range(0, len(todo), BATCH_FILES):
            entries, rows = [], []
            batch = todo[start : start + BATCH_FILES]
            for number, (entry, row) in enumerate(convert_all(batch, holders, max_seconds), start + 1):
                recorded = record(entry, row, folder.number, holders, done)
                entries.append(recorded)
                rows += [row] if row is not None and recorded.shard is not None else []
                tell(number, len(todo))
            folder.write(entries, rows)
        folder.list_failed()
        done.num_shards = len(list(output.glob("documents-*.jsonl")))
        done.failed = [one for name in names.values() if (one := folder.entries[name]).reason not in (None, DUPLICATE)]
    return done


def has_changed(path: Path, entry: JournalEntry) -> bool:
    found = path.stat()
    return (entry.size, entry.mtime_ns) != (found.st_size, found.st_mtime_ns)


def convert_all(
    paths: Sequence[Path], holders: dict[str, str], seconds: float
) -> Iterator[tuple[JournalEntry, dict[str, Any] | None]]:
    """What became of each file, in order. There is always a worker process: only a process without threads may
    fork."""
    prepare = partial(FileConverter, seconds, MEMORY_BYTES, frozenset(holders))
    return map_in_order(prepare, paths, min(len(paths), max(1, num_workers())))


def record(
    entry: JournalEntry, row: dict[str, Any] | None, shard: int, holders: dict[str, str], done: Ingested
) -> JournalEntry:
    """Count a file, and say where its document is, or why there is none."""
    counts = done.new.setdefault(entry.kind or "unknown", Counter())
    counts["files"] += 1
    if (sha256 := str(entry.sha256)) in holders:
        counts["duplicates"] += 1
        return replace(entry, reason=DUPLICATE, detail=holders[sha256])
    if row is None:
        counts["failed"] += 1
        return entry
    counts.update(documents=1, pages=row.get("pages", 0), characters=len(row["text"]))
    done.misnamed += SUFFIXES.get(format_of(entry.path)) != entry.kind
    holders[sha256] = entry.path
    return replace(entry, shard=shard)
