"""The folder that documents are converted into: shards that a recipe's source reads, and in `.ingest` a journal of
what was done.

`documents-00000.jsonl` and so on are complete once they exist. Until a shard is full, its documents and what became of
each file are in a log; a process that is killed loses nothing but the last line of it, and the next one writes the
same bytes as without the interruption.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from cpt.errors import LaunchError, ResourceError

DUPLICATE = "duplicate"


@dataclass(frozen=True)
class Entry:
    """What became of a file."""

    path: str
    size: int = 0
    mtime_ns: int = 0
    sha256: str | None = None
    kind: str | None = None
    shard: int | None = None  # number of the shard that holds the document
    reason: str | None = None  # why there is no document
    detail: str | None = None  # for a duplicate: the other file


class OutputFolder:
    """The shards and the journal of one output folder, while they are written."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self.folder, self._own, self._max_shard_bytes = folder, folder / ".ingest", max_shard_bytes
        self._journal, self.failed_file = self._own / "journal.jsonl", self._own / "failed.jsonl"
        self.entries: dict[str, Entry] = {}
        self._stale, self._num_bytes, self._number = set[int](), 0, 0
        for line in whole_lines(self._journal):
            entry = Entry(**{key: value for key, value in line.items() if key in Entry.__dataclass_fields__})
            self._number = max(self._number, -1 if entry.shard is None else entry.shard + 1)
            if entry.shard is None or self._shard(entry.shard).exists():  # else its file is converted again
                self._take(entry)
        self._number = max((int(log.stem[4:]) for log in self._own.glob("log-*.jsonl")), default=self._number)
        for line in whole_lines(self._log_file):
            self._take(Entry(**line["entry"]), line["row"])
        self._log = self._log_file.open("ab")
        self._seal_if_full()  # where the earlier run died just before

    def record(self, entry: Entry, row: dict[str, Any] | None = None) -> None:
        """Write what became of a file, with its document."""
        entry = entry if row is None else replace(entry, shard=self._number)
        self._log.write(orjson.dumps({"entry": asdict(entry), "row": row}) + b"\n")
        self._log.flush()
        self._take(entry, row)
        self._seal_if_full()

    def finish(self) -> None:
        """Complete the last shard, take out documents of files that have changed since, and list what failed."""
        self._seal()
        self._log.close()
        self._log_file.unlink()
        for number in sorted(self._stale):
            with self._shard(number).open("rb") as stream:
                lines = [(line, self.entries[(row := orjson.loads(line))["path"]], row["sha256"]) for line in stream]
            if kept := [line for line, entry, sha256 in lines if (entry.shard, entry.sha256) == (number, sha256)]:
                write_whole(self._shard(number), kept)
            else:  # sources take an empty file for a mistake
                self._shard(number).unlink()
        failed = [entry for entry in self.entries.values() if entry.reason is not None]
        listed = [
            {"path": one.path, "sha256": one.sha256, "format": one.kind, "reason": one.reason, "detail": one.detail}
            for one in failed
        ]
        write_whole(self.failed_file, (orjson.dumps(line) + b"\n" for line in listed))
        write_whole(self._journal, (orjson.dumps(asdict(entry)) + b"\n" for entry in self.entries.values()))

    def shard_files(self) -> list[Path]:
        """The complete shards."""
        return sorted(self.folder.glob("documents-*.jsonl"))

    def _shard(self, number: int) -> Path:
        return self.folder / f"documents-{number:05}.jsonl"

    @property
    def _log_file(self) -> Path:
        return self._own / f"log-{self._number:05}.jsonl"

    def _take(self, entry: Entry, row: dict[str, Any] | None = None) -> None:
        before = self.entries.get(entry.path)
        if before and before.shard is not None and (before.shard, before.sha256) != (entry.shard, entry.sha256):
            self._stale.add(before.shard)
        self.entries[entry.path] = entry
        self._num_bytes += 0 if row is None else len(orjson.dumps(row)) + 1

    def _seal_if_full(self) -> None:
        if self._num_bytes >= self._max_shard_bytes:
            self._seal()
            self._log.close()
            self._log_file.unlink()
            self._number, self._num_bytes = self._number + 1, 0
            self._log = self._log_file.open("ab")

    def _seal(self) -> None:
        """Write the log's documents as a shard, then its entries to the journal. Doing it twice does no harm."""
        if self._num_bytes:
            rows = (line["row"] for line in whole_lines(self._log_file))
            write_whole(self._shard(self._number), (orjson.dumps(row) + b"\n" for row in rows if row is not None))
        with self._journal.open("ab") as journal:
            journal.writelines(orjson.dumps(line["entry"]) + b"\n" for line in whole_lines(self._log_file))
            os.fsync(journal.fileno())


def whole_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that may be missing; a last line that was not written to its end is cut off."""
    if not file.exists():
        return
    with file.open("rb+") as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                stream.truncate(stream.tell() - len(line))
                return
            yield orjson.loads(line)


def write_whole(file: Path, lines: Iterable[bytes]) -> None:
    """Replace a file at one moment."""
    unfinished = file.with_name(f".{file.name}.unfinished")
    with unfinished.open("wb") as stream:
        stream.writelines(lines)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


@contextmanager
def open_output(folder: Path, max_shard_bytes: int) -> Iterator[OutputFolder]:
    """The folder, for this process alone.

    Raises:
        LaunchError: another process writes there.
        ResourceError: the disk is full or not writable.
    """
    try:
        (folder / ".ingest").mkdir(parents=True, exist_ok=True)
        with (folder / ".ingest/lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel frees it when this process dies
            except BlockingIOError as problem:
                raise LaunchError(
                    f"{folder}: another `cpt data ingest` writes there. Wait for it, or give another --output."
                ) from problem
            yield OutputFolder(folder, max_shard_bytes)
    except OSError as problem:
        raise ResourceError(
            f"{folder}: cannot be written ({problem.strerror or problem}). Free space, or give another --output."
        ) from problem
