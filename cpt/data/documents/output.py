"""The folder that documents are converted into: shards that a recipe's source reads, and a journal in `.ingest`.

Each batch of files writes one shard, then its part of the journal. A process that is killed between the two writes the
same shard again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from cpt.files import read_json_lines, write_atomic

DUPLICATE = "duplicate"


@dataclass(frozen=True)
class JournalEntry:
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

    def __init__(self, folder: Path) -> None:
        self.folder, self.own = folder, folder / ".ingest"
        self.failed_file = self.own / "failed.jsonl"
        parts = sorted(self.own.glob("journal-*.jsonl"))
        self.number = int(parts[-1].stem[-5:]) + 1 if parts else 0
        self.entries: dict[str, JournalEntry] = {}
        for entry in (JournalEntry(**line) for part in parts for line in read_json_lines(part)):
            if entry.shard is None or self.shard(entry.shard).exists():  # else the file is converted again
                self.entries[entry.path] = entry

    def write(self, entries: Sequence[JournalEntry], rows: Sequence[dict[str, Any]]) -> None:
        """Write what became of a batch of files, with its documents."""
        if rows:
            write_lines(self.shard(self.number), rows)
        else:  # sources refuse an empty file
            self.shard(self.number).unlink(missing_ok=True)
        write_lines(self.own / f"journal-{self.number:05}.jsonl", map(asdict, entries))
        self.entries |= {entry.path: entry for entry in entries}
        self.number += 1

    def list_failed(self) -> None:
        """Write failed.jsonl: each file without a document, and why."""
        keys = {"path": "path", "sha256": "sha256", "format": "kind", "reason": "reason", "detail": "detail"}
        failed = [entry for entry in self.entries.values() if entry.reason is not None]
        write_lines(self.failed_file, ({key: vars(entry)[name] for key, name in keys.items()} for entry in failed))

    def shard(self, number: int) -> Path:
        return self.folder / f"documents-{number:05}.jsonl"


def write_lines(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    write_atomic(file, b"".join(orjson.dumps(line) + b"\n" for line in lines), durable=True)
