"""The folder that documents are converted into: shards that a recipe's source reads, and a journal of what was done.

`documents-00000.jsonl` and so on are complete when they are there. The shard that is being filled, the journal and failed.jsonl stand
in `.ingest`, which sources pass over. A document is written first and then its line of the journal, so whatever moment a process dies at,
the next one knows what is done, cuts off the rest, and goes on: the bytes are the same as without the interruption.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import orjson

from cpt.errors import LaunchError, ResourceError

OWN_FOLDER = ".ingest"


@dataclass(frozen=True)
class Entry:
    """What became of a file: a line of the journal."""

    path: str
    size: int
    mtime_ns: int
    sha256: str | None
    kind: str | None = None
    shard: int | None = None
    """Number of the shard that holds the document."""
    end: int = 0
    """Where the document ended in the shard when it was written."""
    reason: str | None = None
    """Why there is no document."""
    detail: str | None = None

    @property
    def is_duplicate(self) -> bool:
        """True for a file whose bytes were those of another one."""
        return self.reason == DUPLICATE


DUPLICATE = "duplicate"


class OutputFolder:
    """The shards and the journal of one output folder, while they are written."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        """Take up what an earlier run left."""
        self.folder, self._own, self._max_shard_bytes = folder, folder / OWN_FOLDER, max_shard_bytes
        self._journal_file = self._own / "journal.jsonl"
        written = list(read_whole_lines(self._journal_file))
        self.history = [entry for entry in written if self._is_kept(entry)]
        if len(self.history) < len(written):  # or they would seem right again once another shard has the number
            write_journal(self._journal_file, self.history)
        self.entries = {entry.path: entry for entry in self.history}
        self._journal = self._journal_file.open("ab")
        self._shard_number = self._next_number()
        self._shard = self._open_shard()
        self._seal_if_full()  # where the earlier run died just before

    def add(self, document: dict[str, object], entry: Entry) -> None:
        """Write a document, and that it is written."""
        self._shard.write(orjson.dumps(document) + b"\n")
        self._shard.flush()
        self.record(Entry(**{**asdict(entry), "shard": self._shard_number, "end": self._shard.tell()}))
        self._seal_if_full()

    def record(self, entry: Entry) -> None:
        """Write what became of a file."""
        self._journal.write(orjson.dumps(asdict(entry)) + b"\n")
        self._journal.flush()
        self.history.append(entry)
        self.entries[entry.path] = entry

    def finish(self) -> None:
        """Complete the last shard, take out documents of files that have changed since, and list what failed."""
        if self._shard.tell():
            self._seal()
        self._shard.close()
        self._unfinished(self._shard_number).unlink(missing_ok=True)
        self._take_out_stale()
        failed = [entry for entry in self.entries.values() if entry.reason is not None]
        write_whole(self.failed_file, b"".join(orjson.dumps(listed(entry)) + b"\n" for entry in failed))
        self._journal.close()
        write_journal(self._journal_file, self.entries.values())

    @property
    def failed_file(self) -> Path:
        """Where the files are listed that gave no document."""
        return self._own / "failed.jsonl"

    def shard_files(self) -> list[Path]:
        """The complete shards."""
        return sorted(self.folder.glob("documents-*.jsonl"))

    def _sealed(self, number: int) -> Path:
        return self.folder / f"documents-{number:05}.jsonl"

    def _unfinished(self, number: int) -> Path:
        return self._own / f"documents-{number:05}.jsonl.part"

    def _is_kept(self, entry: Entry) -> bool:
        """False where the shard that an entry speaks of was removed: the file is converted again."""
        if entry.shard is None or self._sealed(entry.shard).exists():
            return True
        file = self._unfinished(entry.shard)
        return file.exists() and file.stat().st_size >= entry.end

    def _next_number(self) -> int:
        """The shard that was being filled, or a new one after the last."""
        last = max((entry.shard for entry in self.history if entry.shard is not None), default=-1)
        return last if last >= 0 and not self._sealed(last).exists() else last + 1

    def _open_shard(self) -> BinaryIO:
        """The shard to write to, up to where the journal says that it is written."""
        end = max((entry.end for entry in self.history if entry.shard == self._shard_number), default=0)
        stream = self._unfinished(self._shard_number).open("ab")
        stream.truncate(end)
        stream.seek(end)
        return stream

    def _seal_if_full(self) -> None:
        if self._shard.tell() >= self._max_shard_bytes:
            self._seal()

    def _seal(self) -> None:
        """Give the filled shard its name, and begin the next."""
        os.fsync(self._shard.fileno())
        self._shard.close()
        self._unfinished(self._shard_number).rename(self._sealed(self._shard_number))
        self._shard_number += 1
        self._shard = self._open_shard()

    def _take_out_stale(self) -> None:
        """Rewrite shards without the documents of files whose journal goes on to say something else."""
        stale = {
            (entry.shard, entry.path, entry.sha256)
            for entry in self.history
            if entry.shard is not None and (entry.shard, entry.sha256) != (self.entries[entry.path].shard, self.entries[entry.path].sha256)
        }
        for number in sorted({shard for shard, *_ in stale}):
            file = self._sealed(number)
            kept = []
            if not file.exists():
                continue
            with file.open("rb") as lines:
                for line in lines:
                    row = orjson.loads(line)
                    if (number, row["path"], row["sha256"]) not in stale:
                        kept.append(line)
            if kept:
                write_whole(file, b"".join(kept))
            else:  # sources take an empty file for a mistake
                file.unlink()


def read_whole_lines(journal: Path) -> Iterator[Entry]:
    """The entries of the journal; a last line that was not written to its end is cut off."""
    if not journal.exists():
        return
    raw = journal.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        write_whole(journal, whole)
    for line in whole.splitlines():
        yield Entry(**orjson.loads(line))


def write_journal(journal: Path, entries: Iterable[Entry]) -> None:
    """A journal of these entries in the place of the old one."""
    write_whole(journal, b"".join(orjson.dumps(asdict(entry)) + b"\n" for entry in entries))


def write_whole(file: Path, raw: bytes) -> None:
    """Put a file in the place of another at one moment."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    with unfinished.open("wb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


@contextmanager
def open_output(folder: Path, max_shard_bytes: int) -> Iterator[OutputFolder]:
    """The folder, for this process alone.

    Raises:
        LaunchError: another process fills it.
        ResourceError: the disk is full or not writable.
    """
    try:
        (folder / OWN_FOLDER).mkdir(parents=True, exist_ok=True)
        with (folder / OWN_FOLDER / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when this process dies
            except BlockingIOError as problem:
                raise LaunchError(f"{folder}: another `cpt data ingest` writes there. Wait for it, or give another --output.") from problem
            yield OutputFolder(folder, max_shard_bytes)
    except OSError as problem:
        raise ResourceError(
            f"{folder}: cannot be written ({problem.strerror or problem}). Free space, or give another --output."
        ) from problem


def listed(entry: Entry) -> dict[str, object]:
    """A line of failed.jsonl."""
    return {"path": entry.path, "sha256": entry.sha256, "format": entry.kind, "reason": entry.reason, "detail": entry.detail}


def failures(entries: Iterable[Entry]) -> list[Entry]:
    """The files that ought to have given a document."""
    return [entry for entry in entries if entry.reason is not None and not entry.is_duplicate]
