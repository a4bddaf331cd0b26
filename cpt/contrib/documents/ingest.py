"""Convert files and folders of documents to jsonl for a recipe's source; a second run converts only new files.

Each batch of files writes one shard, then its part of the journal. A process killed between the two rewrites the
same shard."""

import hashlib
import logging
import multiprocessing
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import orjson

from cpt.contrib.documents.charsets import codec_named
from cpt.contrib.documents.convert import (
    CONVERTERS,
    MAX_UNPACKED_BYTES,
    SUFFIXES,
    TEXT_KINDS,
    kind_of,
    with_clean_text,
)
from cpt.contrib.documents.errors import NotConverted
from cpt.data.readers.filters import without_lines
from cpt.data.readers.opening import DAMAGE, compression_of, open_file
from cpt.data.readers.shared_lines import SharedLines
from cpt.data.store.parallel import map_in_order, num_workers
from cpt.errors import DISTRIBUTION, DataError
from cpt.files import json_lines, output_locked, write_atomic
from cpt.recipe.paths import format_of

BATCH_FILES = 256  # texts in memory at a time, and files per output shard
MEMORY_BYTES = 4 * 2**30  # limit for a converter


@dataclass(frozen=True)
class JournalEntry:
    path: str
    size: int = 0
    mtime_ns: int = 0
    inode: int = 0  # 0 in the records of earlier versions, as is the next
    ctime_ns: int = 0
    sha256: str | None = None
    kind: str | None = None
    shard: int | None = None  # the document's shard
    reason: str | None = None  # why the file was not converted
    detail: str | None = None  # for a duplicate: the other file


@dataclass
class Ingested:
    folder: Path
    failed_file: Path
    num_shards: int = 0  # in the folder, including earlier runs
    passed_over: Counter[str] = field(
        default_factory=Counter
    )  # suffix -> files in folders that are not documents
    num_known: int = 0  # files that an earlier run converted or listed
    num_changed: int = 0  # known files that changed since
    # Kind -> files, documents, pages, characters, duplicates, failed.
    new: dict[str, Counter[str]] = field(default_factory=dict)
    failed: list[JournalEntry] = field(
        default_factory=list
    )  # inputs that were not converted, now or before
    dropped: Counter[str] = field(
        default_factory=Counter
    )  # kind of content -> how often new documents lost it
    num_losing: Counter[str] = field(
        default_factory=Counter
    )  # the same kind -> documents that lost it
    shared: SharedLines = field(default_factory=SharedLines)  # of all documents in the folder
    dropped_lines: list[str] = field(default_factory=list)  # of these, now or by an earlier run


def ingest(
    inputs: Sequence[Path],
    output: Path,
    *,
    max_seconds: float = 120.0,
    retry_failed: bool = False,
    encoding: str | None = None,
    drop_shared_lines: bool = False,
    report: Callable[[int, int], None] = lambda done, of: None,
) -> Ingested:
    """Convert the new files among the inputs, and add them to the output folder.

    A file that cannot be converted is listed, and retried only with `retry_failed`. A file that changed since it was
    converted keeps its old text. The output does not depend on the number of workers (CPT_WORKERS) or on
    interruptions. `max_seconds` limits the conversion of a file; `report` gets the numbers of finished and all files.
    `encoding` is that of files that declare none and are not UTF-8. With `drop_shared_lines`, lines that most
    documents of the folder share are dropped from all of them; later runs drop the same lines from new documents.

    Raises DataError for an input that does not exist or an unknown encoding, ResourceError if the output folder is
    not writable, and LaunchError if another process writes to it."""
    files, passed_over = find_documents(inputs, output)
    codec = None if encoding is None else codec_named(encoding)
    if encoding is not None and codec is None:
        remedy = "unknown encoding, expected one like cp1251 or gb18030."
        raise DataError(f"--encoding {encoding}: {remedy}")
    names = {path: str(path).encode("utf-8", "backslashreplace").decode() for path in files}
    with output_locked(output, output / ".ingest/lock", "cpt data ingest"):
        folder = OutputFolder(output)
        entry_of_file: dict[Path, JournalEntry] = {}
        for path, name in names.items():
            if name in folder.entries:
                entry_of_file[path] = folder.entries[name]
        changed = renew_entries(entry_of_file, folder)
        again = set[Path]()
        for path, entry in entry_of_file.items():
            if entry.reason and (retry_failed or path in changed):
                again.add(path)
        todo = [path for path in files if path not in entry_of_file or path in again]
        done = Ingested(
            output, folder.failed_file, passed_over=passed_over, num_known=len(files) - len(todo)
        )
        done.num_changed = len(changed - again)
        convert_batches(todo, folder, done, report, max_seconds=max_seconds, encoding=codec)
        folder.write_failed()
        done.num_shards = len(folder.shards())
        done.shared = folder.count_lines()
        done.dropped_lines = folder.drop_lines(done.shared.found() if drop_shared_lines else ())
        for name in names.values():
            entry = folder.entries[name]
            if entry.reason not in (None, DUPLICATE):
                done.failed.append(entry)
    return done


def renew_entries(entry_of_file: Mapping[Path, JournalEntry], folder: "OutputFolder") -> set[Path]:
    """Record the present status of files with the same content; return the files with another content."""
    changed = set[Path]()
    renewed = list[JournalEntry]()
    for path, entry in entry_of_file.items():
        current = with_current_status(entry, path)
        if current is None:
            changed.add(path)
        elif current != entry:
            renewed.append(current)
    if renewed:
        folder.write(renewed, [])
    return changed


def convert_batches(
    files: Sequence[Path],
    folder: "OutputFolder",
    done: Ingested,
    report: Callable[[int, int], None],
    *,
    max_seconds: float,
    encoding: str | None,
) -> None:
    """Convert files, and write each batch of them as a shard."""
    holders: dict[str, str] = {}  # sha256 -> path of its first file
    for entry in folder.entries.values():
        if entry.shard is not None:
            holders[str(entry.sha256)] = entry.path
    for start in range(0, len(files), BATCH_FILES):
        entries = []
        rows = []
        batch = files[start : start + BATCH_FILES]
        # Always use a worker process: only a process without threads may fork.
        workers = min(len(batch), max(1, num_workers()))
        prepare = partial(partial, convert_file, max_seconds, frozenset(holders), encoding=encoding)
        converted = map_in_order(prepare, batch, workers)
        for number, (entry, row) in enumerate(converted, start + 1):
            recorded = record(entry, row, folder.number, holders, done)
            entries.append(recorded)
            if row is not None and recorded.shard is not None:
                rows.append(row)
            report(number, len(files))
        folder.write(entries, rows)


def record(
    entry: JournalEntry,
    row: dict[str, Any] | None,
    shard: int,
    holders: dict[str, str],
    done: Ingested,
) -> JournalEntry:
    """Count a file, and record the shard of its document or the reason for its failure."""
    counts = done.new.setdefault(entry.kind or "unknown", Counter())
    counts["files"] += 1
    sha256 = str(entry.sha256)
    if sha256 in holders:
        counts["duplicates"] += 1
        return replace(entry, reason=DUPLICATE, detail=holders[sha256])
    if row is None:
        counts["failed"] += 1
        return entry
    counts.update(documents=1, pages=row.get("pages", 0), characters=len(row["text"]))
    done.dropped.update(row.get("dropped", {}))
    done.num_losing.update(row.get("dropped", {}).keys())
    holders[sha256] = entry.path
    return replace(entry, shard=shard)


def find_documents(inputs: Sequence[Path], output: Path) -> tuple[list[Path], Counter[str]]:
    """The given files and the documents below folders, sorted, and the number of other files by suffix."""
    files = list[Path]()
    other_reasons = Counter[str]()
    ours = output.resolve()
    for path in inputs:
        if path.is_dir() and path.resolve().is_relative_to(ours):
            raise DataError(
                f"{path} is in the output folder {output}. Set --output to another folder."
            )
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path}: no such file or folder in {Path.cwd()}.")
        if path.is_file():
            files.append(path)
            continue
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if hidden or not file.is_file() or file.resolve().is_relative_to(ours):
                continue
            if format_of(file.name) in SUFFIXES:
                files.append(file)
            else:
                other_reasons[format_of(file.name) or "no suffix"] += 1
    return list(dict.fromkeys(files)), other_reasons


def with_current_status(entry: JournalEntry, path: Path) -> JournalEntry | None:
    """The entry with the file's present status, or None if its content is another than the recorded one.

    A copy of the file, or another text of the same size and time, differ in inode and ctime, so its hash decides."""
    current = replace(entry, **status_of(path))
    if current == entry:
        return entry
    if entry.sha256 is None:  # could not be read
        is_same = (current.size, current.mtime_ns) == (entry.size, entry.mtime_ns)
        if is_same:
            return current
        return None
    try:
        is_same = hashlib.sha256(content_of(path)).hexdigest() == entry.sha256
    except (NotConverted, *DAMAGE):
        is_same = False
    if is_same:
        return current
    return None


def status_of(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
        "ctime_ns": status.st_ctime_ns,
    }


def content_of(path: Path) -> bytes:
    is_compressed = compression_of(str(path)) is not None
    with open_file(str(path)) as stream:
        raw = stream.read(MAX_UNPACKED_BYTES + 1 if is_compressed else -1)
    if is_compressed and len(raw) > MAX_UNPACKED_BYTES:
        detail = f"the limit is {MAX_UNPACKED_BYTES // 2**20} MiB"
        raise NotConverted("too large when unpacked", detail)
    return raw


def convert_file(
    max_seconds: float, known_hashes: frozenset[str], path: Path, encoding: str | None = None
) -> tuple[JournalEntry, dict[str, Any] | None]:
    """Convert a file in a child of this worker process, unless its sha256 is already known."""
    entry = JournalEntry(str(path).encode("utf-8", "backslashreplace").decode())
    try:
        entry = replace(entry, **status_of(path))
        raw = content_of(path)
        entry = replace(entry, sha256=hashlib.sha256(raw).hexdigest())
        entry = replace(entry, kind=(kind := kind_of(raw, path.name)))
        if entry.sha256 in known_hashes:
            return entry, None
        convert, modules = CONVERTERS[kind]
        for module in modules:
            import_module(module)  # once, before the fork
        function = partial(convert, encoding=encoding) if kind in TEXT_KINDS else convert
        converted = run_isolated(function, raw, max_seconds)
        document = with_clean_text(converted, tidy=kind not in ("md", "txt"))
    except NotConverted as problem:
        return replace(entry, reason=problem.reason, detail=problem.detail), None
    except DAMAGE as problem:
        error_text = problem.strerror if isinstance(problem, OSError) else None
        return replace(entry, reason="cannot be read", detail=error_text or str(problem)), None
    packages = [module.replace("_", "-") for module in modules]
    converter = ", ".join(
        [f"cpt {version(DISTRIBUTION)}", *(f"{package} {version(package)}" for package in packages)]
    )
    row: dict[str, Any] = {
        "text": document.text,
        "path": entry.path,
        "sha256": entry.sha256,
        "format": kind,
    }
    row["title"] = document.title
    if document.pages is not None:
        row["pages"] = document.pages
    if document.encoding is not None:
        row["encoding"] = document.encoding
    if document.dropped:
        row["dropped"] = dict(document.dropped)
    row["converter"] = converter
    return entry, row


Argument = TypeVar("Argument")
Result = TypeVar("Result")
FORK = multiprocessing.get_context("fork")


def run_isolated(
    function: Callable[[Argument], Result], argument: Argument, max_seconds: float
) -> Result:
    """Call the function in a child process, forked so that libraries are imported once: only in a process without
    threads. Raises NotConverted if the function raises, crashes, or takes too long or too much memory."""
    receiving, sending = FORK.Pipe(duplex=False)
    child = FORK.Process(target=answer, args=(function, argument, sending, max_seconds))
    child.start()
    sending.close()
    received: Result | NotConverted | None = None
    with suppress(EOFError):
        received = receiving.recv()
    child.join()
    if isinstance(received, NotConverted):
        raise received
    if received is not None:
        return received
    if child.exitcode == -signal.SIGALRM:
        raise NotConverted("took too long", f"more than {max_seconds:g} seconds")
    code = child.exitcode or 0
    cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise NotConverted("the converter crashed", cause)


def answer(
    function: Callable[[Argument], Any], argument: Argument, sending: Connection, max_seconds: float
) -> None:
    """In the child process: the kernel ends it when its time is over, and denies it more memory."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, max_seconds)
    if sys.platform == "linux":  # the limit only works on Linux
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.disable()
    try:
        sending.send(function(argument))
    except NotConverted as problem:
        sending.send(problem)
    except MemoryError:
        sending.send(NotConverted("too much memory", f"more than {MEMORY_BYTES / 2**30:.1f} GiB"))
    except Exception as problem:  # libraries raise any error; it is listed with the file
        error_text = " ".join(f"{type(problem).__name__}: {problem}".split())[:500]
        sending.send(NotConverted("the converter failed", error_text))


DUPLICATE = "duplicate"
SHARED = "characters of shared lines"


class OutputFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = folder / ".ingest"
        self.failed_file = self.own / "failed.jsonl"
        parts = sorted(self.own.glob("journal-*.jsonl"))
        self.number = int(parts[-1].stem[-5:]) + 1 if parts else 0
        self.entries: dict[str, JournalEntry] = {}
        lines = chain.from_iterable(map(json_lines, parts))
        for line in filter(None, lines):
            entry = JournalEntry(**line)
            # Without its shard, the file is converted again.
            if entry.shard is None or self.shard(entry.shard).exists():
                self.entries[entry.path] = entry

    def write(self, entries: Sequence[JournalEntry], rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            write_lines(self.shard(self.number), rows)
        else:  # sources reject empty files
            self.shard(self.number).unlink(missing_ok=True)
        write_lines(self.own / f"journal-{self.number:05}.jsonl", map(asdict, entries))
        self.entries |= {entry.path: entry for entry in entries}
        self.number += 1

    def write_failed(self) -> None:
        """List the files that have no document of their own, with the reasons."""
        failed = []
        for entry in self.entries.values():
            if entry.reason is None:
                continue
            line = {
                "path": entry.path,
                "sha256": entry.sha256,
                "format": entry.kind,
                "reason": entry.reason,
                "detail": entry.detail,
            }
            failed.append(line)
        write_lines(self.failed_file, failed)

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("documents-*.jsonl"))

    def count_lines(self) -> SharedLines:
        shared = SharedLines()
        for shard in self.shards():
            for row in filter(None, json_lines(shard)):
                shared.add(row["text"])
        return shared

    def drop_lines(self, repeated_lines: Iterable[str]) -> list[str]:
        """Drop these lines, and those that an earlier run dropped, from all documents. Returns all of them."""
        file = self.own / "dropped_lines.json"
        before = orjson.loads(file.read_bytes()) if file.exists() else []
        lines = list(dict.fromkeys([*before, *repeated_lines]))
        if not lines:
            return []
        write_atomic(file, orjson.dumps(lines), durable=True)
        for shard in self.shards():
            rows = [row for row in json_lines(shard) if row is not None]
            for row in rows:
                text = without_lines(row["text"], lines)
                num_dropped = len(row["text"]) - len(text)
                if num_dropped:
                    dropped = Counter(row.get("dropped", {}))
                    dropped[SHARED] += num_dropped
                    row |= {"text": text, "dropped": dropped}
            write_lines(shard, rows)
        return lines

    def shard(self, number: int) -> Path:
        return self.folder / f"documents-{number:05}.jsonl"


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    write_atomic(file, b"".join(orjson.dumps(line) + b"\n" for line in lines), durable=True)
