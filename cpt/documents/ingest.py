"""Convert files and folders of documents into jsonl that a recipe's source reads; started again, only what is new is converted."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cpt.data.parallel import map_in_order, num_workers
from cpt.documents.convert import FileConverter, Outcome, name_of_converter
from cpt.documents.kinds import SUFFIXES, find_documents
from cpt.documents.output import DUPLICATE, Entry, OutputFolder, failures, open_output

BATCH_FILES, BATCH_BYTES = 512, 256 * 2**20  # what is converted, and kept in memory, before it is written
MAX_SECONDS = 120.0
MEMORY_BYTES = 4 * 2**30
SHARD_MB = 64


@dataclass
class Ingested:
    """What `ingest` did."""

    folder: Path
    failed_file: Path
    num_shards: int = 0
    """In the folder, those of earlier runs included."""
    passed_over: Counter[str] = field(default_factory=Counter)
    """Suffix -> files in folders that are no documents."""
    num_known: int = 0
    """Files that an earlier run has dealt with."""
    new: dict[str, Counter[str]] = field(default_factory=dict)
    """Of this run, by kind: `files`, `documents`, `pages`, `characters`, `duplicates`, `failed`."""
    misnamed: int = 0
    """New documents of another kind than their suffix says."""
    failed: list[Entry] = field(default_factory=list)
    """Of the files that were asked for, those that gave no document, now or before."""


def ingest(
    inputs: Sequence[Path],
    output: Path,
    *,
    max_seconds: float = MAX_SECONDS,
    shard_mb: int = SHARD_MB,
    retry_failed: bool = False,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> Ingested:
    """Convert what is new among the inputs, and add it to the output folder.

    What is wrong with a file is listed and ends nothing. The bytes do not depend on the number of workers (CPT_WORKERS), nor on whether the
    work was interrupted.

    Args:
        max_seconds: after which a converter is given up on a file.
        shard_mb: a file of the output is complete when it has so many megabytes; a document is never cut.
        retry_failed: try files again that an earlier run could not convert.
        tell: is told how many files are done, of how many.

    Raises:
        DataError: an input is not there.
        ResourceError: the output folder cannot be written.
        LaunchError: another process writes there.
    """
    found = find_documents(inputs, output)
    with open_output(output, shard_mb * 10**6) as folder:
        known = {name_of(path): folder.entries.get(name_of(path)) for path in found.files}
        todo = [path for path in found.files if is_to_do(path, known[name_of(path)], folder, retry_failed)]
        done = Ingested(output, folder.failed_file, passed_over=found.passed_over, num_known=len(found.files) - len(todo))
        documents = holders(folder, {name_of(path) for path in todo})
        for number, outcome in enumerate(convert_all(todo, documents, max_seconds), 1):
            take_in(outcome, folder, documents, done)
            tell(number, len(todo))
        folder.finish()
        done.num_shards = len(folder.shard_files())
        done.failed = failures(folder.entries[name_of(path)] for path in found.files)
    return done


def name_of(path: Path) -> str:
    """The path as it is written to files: as it was given, and UTF-8 whatever bytes it has."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def is_to_do(path: Path, entry: Entry | None, folder: OutputFolder, retry_failed: bool) -> bool:
    """True for a file that is new, has changed, or has lost the file that it was the duplicate of."""
    if entry is None or (retry_failed and entry.reason is not None):
        return True
    if entry.is_duplicate and not is_unchanged(Path(str(entry.detail)), folder.entries.get(str(entry.detail))):
        return True
    return not is_unchanged(path, entry)


def is_unchanged(path: Path, entry: Entry | None) -> bool:
    """True for a file that is as it was, or is gone (its document stays)."""
    try:
        found = path.stat()
    except OSError:
        return True
    return entry is not None and (entry.size, entry.mtime_ns) == (found.st_size, found.st_mtime_ns)


def holders(folder: OutputFolder, todo: set[str]) -> dict[str, str]:
    """sha256 -> the file that its document was made from, but for files that are going to be converted again."""
    return {str(entry.sha256): path for path, entry in folder.entries.items() if entry.shard is not None and path not in todo}


def convert_all(paths: Sequence[Path], documents: dict[str, str], seconds: float) -> Iterator[Outcome]:
    """What becomes of each file, in order.

    There is always at least one worker process: each file is converted in a child of it, and only a process without threads may fork.
    """
    for batch in batches(paths):
        known, workers = frozenset(documents), min(len(batch), max(1, num_workers()))
        yield from map_in_order(partial(FileConverter, seconds, MEMORY_BYTES, known), batch, workers)


def batches(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """So many files that their texts fit into memory together."""
    batch: list[Path] = []
    num_bytes = 0
    for path in paths:
        batch.append(path)
        num_bytes += path.stat().st_size if path.exists() else 0
        if len(batch) == BATCH_FILES or num_bytes >= BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def take_in(outcome: Outcome, folder: OutputFolder, documents: dict[str, str], done: Ingested) -> None:
    """Write a document, or why there is none."""
    name = name_of(outcome.path)
    entry = Entry(name, outcome.size, outcome.mtime_ns, outcome.sha256, outcome.kind)
    counts = done.new.setdefault(outcome.kind or "unknown", Counter())
    counts["files"] += 1
    before = folder.entries.get(name)
    if holder := documents.get(outcome.sha256 or ""):
        counts["duplicates"] += 1
        folder.record(replace(entry, reason=DUPLICATE, detail=holder))
        return
    if outcome.document is None or outcome.sha256 is None or outcome.kind is None:
        counts["failed"] += 1
        folder.record(replace(entry, reason=outcome.reason, detail=outcome.detail))
        return
    documents[outcome.sha256] = name
    if before is not None and before.shard is not None and before.sha256 == outcome.sha256:  # it has another time, and nothing else
        folder.record(replace(entry, shard=before.shard, end=before.end))
        return
    folder.add(row_of(outcome, name), entry)
    document = outcome.document
    counts.update(documents=1, pages=document.pages or 0, characters=len(document.text))
    done.misnamed += SUFFIXES.get(outcome.path.suffix.lower()) != outcome.kind


def row_of(outcome: Outcome, name: str) -> dict[str, object]:
    """The line of a shard."""
    assert outcome.document is not None and outcome.kind is not None
    row: dict[str, object] = {
        "text": outcome.document.text,
        "path": name,
        "sha256": outcome.sha256,
        "format": outcome.kind,
        "title": outcome.document.title,
    }
    if outcome.document.pages is not None:
        row["pages"] = outcome.document.pages
    return {**row, "converter": name_of_converter(outcome.kind)}
