"""The folder that documents are converted into: shards that a recipe's source reads, and a journal in `.ingest`.

A document is appended to its shard first, then its file to the journal. A process that is killed between the two loses
that one document, and the next one writes the same bytes as without the interruption.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from cpt.errors import LaunchError, ResourceError
from cpt.files import locked, read_json_lines, write_atomic

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
    """The shards and the journal, while they are written."""

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        own = folder / ".ingest"
        self.folder, self.max_shard_bytes = folder, max_shard_bytes
        self.journal, self.failed_file, self.unfinished = (
            own / "journal.jsonl",
            own / "failed.jsonl",
            own / "unfinished",
        )
        self.entries: dict[str, Entry] = {}
        self.stale: set[int] = set()  # shards that hold documents of files that have changed since
        for entry in (Entry(**line) for line in read_json_lines(self.journal)):
            if entry.shard is None or self.shard(entry.shard).exists():  # else the file is converted again
                self.take(entry)
        last = max((int(file.stem[-5:]) for file in self.shard_files()), default=-1)
        self.number = last if last >= 0 and self.unfinished.exists() else last + 1
        if self.shard(self.number).exists():
            self.rewrite(self.number)
        self.unfinished.touch()
        write_lines(self.journal, (asdict(entry) for entry in self.entries.values()))

    def record(self, entry: Entry, row: dict[str, Any] | None = None) -> None:
        """Write what became of a file, with its document."""
        if row is not None:
            shard = self.shard(self.number)
            if shard.exists() and shard.stat().st_size >= self.max_shard_bytes:
                self.number += 1
            entry = replace(entry, shard=self.number)
            with self.shard(self.number).open("ab") as stream:
                stream.write(orjson.dumps(row) + b"\n")
        with self.journal.open("ab") as stream:
            stream.write(orjson.dumps(asdict(entry)) + b"\n")
        self.take(entry)

    def finish(self) -> None:
        """Remove documents of files that have changed since, and list what failed."""
        for number in sorted(self.stale):
            self.rewrite(number)
        failed = [entry for entry in self.entries.values() if entry.reason is not None]
        keys = {"path": "path", "sha256": "sha256", "format": "kind", "reason": "reason", "detail": "detail"}
        write_lines(self.failed_file, ({key: vars(entry)[name] for key, name in keys.items()} for entry in failed))
        write_lines(self.journal, (asdict(entry) for entry in self.entries.values()))
        self.unfinished.unlink()

    def shard_files(self) -> list[Path]:
        """All shards, in order."""
        return sorted(self.folder.glob("documents-*.jsonl"))

    def shard(self, number: int) -> Path:
        """The file of a shard."""
        return self.folder / f"documents-{number:05}.jsonl"

    def take(self, entry: Entry) -> None:
        """Remember an entry; the document of an earlier one is stale."""
        before = self.entries.get(entry.path)
        if before and before.shard is not None and (before.shard, before.sha256) != (entry.shard, entry.sha256):
            self.stale.add(before.shard)
        self.entries[entry.path] = entry

    def rewrite(self, number: int) -> None:
        """Keep the documents of a shard that the journal knows; a shard without any is removed."""

        def is_current(row: dict[str, Any]) -> bool:
            entry = self.entries.get(row["path"])
            return entry is not None and (entry.shard, entry.sha256) == (number, row["sha256"])

        rows = [row for row in read_json_lines(self.shard(number)) if is_current(row)]
        if rows:
            write_lines(self.shard(number), rows)
        else:  # sources refuse an empty file
            self.shard(number).unlink()


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Replace a file of JSON lines."""
    write_atomic(file, b"".join(orjson.dumps(line) + b"\n" for line in lines), durable=True)


@contextmanager
def open_output(folder: Path, max_shard_bytes: int) -> Iterator[OutputFolder]:
    """The folder, for this process alone.

    Raises:
        LaunchError: another process writes there.
        ResourceError: the disk is full or not writable.
    """
    try:
        with locked(folder / ".ingest/lock", wait=False) as is_ours:
            if not is_ours:
                raise LaunchError(
                    f"{folder}: another `cpt data ingest` writes there. Wait for it, or give another --output."
                )
            yield OutputFolder(folder, max_shard_bytes)
    except OSError as problem:
        raise ResourceError(
            f"{folder}: {problem.strerror or problem}. Free space, or give another --output."
        ) from problem
