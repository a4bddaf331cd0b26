"""Write files durably, and hash them while they are written."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from xxhash import xxh3_128

from cpt.checkpoints.manifest import FileEntry, hash_file
from cpt.files import make_durable

FILES_AT_ONCE = 4  # while one waits for the disk, another is serialized
PIECE = 1 << 18

Task = Callable[[], dict[str, FileEntry]]
"""Writes files, and returns their entries."""


class HashedFile:
    """A file that is hashed while it is written; `torch.save` writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest, self.size = xxh3_128(), 0
        self.problem: OSError | None = None

    def __enter__(self) -> "HashedFile":
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        return self

    def write(self, data: Any) -> int:
        """Write the bytes of any buffer, in pieces that stay in the processor's cache."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                self.digest.update(piece)
                written = 0
                while written < len(piece):
                    written += os.write(self.descriptor, piece[written:])
                self.size += written
        except OSError as problem:  # torch.save would raise a RuntimeError about an "unexpected pos" instead
            problem.filename = str(self.path)
            self.problem = problem
            raise
        return len(view)

    def flush(self) -> None:
        """`torch.save` calls it; nothing is buffered."""

    def entry(self) -> FileEntry:
        """Size and hash, once the disk has the file."""
        os.fsync(self.descriptor)
        return FileEntry(self.size, self.digest.hexdigest())

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.descriptor)


def write_state(path: Path, state: Any) -> FileEntry:
    """`torch.save`, durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        try:
            torch.save(state, file)  # type: ignore[arg-type]  # it only writes
        except RuntimeError as problem:
            if file.problem is None:
                raise
            raise file.problem from problem
        return file.entry()


def write_text(path: Path, text: str) -> FileEntry:
    """A small text, durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        file.write(text.encode())
        return file.entry()


def hash_durably(path: Path) -> FileEntry:
    """The entry of an existing file, hashed while the disk is busy with it."""
    with ThreadPoolExecutor(1) as helper:
        durable = helper.submit(make_durable, path)
        entry = hash_file(path)
        durable.result()
    return entry


def all_at_once(tasks: Sequence[Task]) -> dict[str, FileEntry]:
    """The entries of all tasks, of which several run at the same time; after a failure no further task is started."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return {path: entry for future in futures for path, entry in future.result().items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
