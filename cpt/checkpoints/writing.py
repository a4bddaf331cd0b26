"""Write files so that they are known by their hash and are on the disk, not only in the system's memory."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from xxhash import xxh3_128

from cpt.checkpoints.manifest import FileEntry, hash_file, make_durable

WRITTEN_AT_ONCE = 4  # files; what one of them waits for is the disk, the other works
PIECE = 1 << 18
SENT_EARLY = 256 << 20  # bytes after which the disk is told to begin, so that little is left to wait for at the end

Task = Callable[[], dict[str, FileEntry]]
"""Writes files, and gives their entries."""


class HashedFile:
    """A file that is hashed while it is written, and sent to the disk on the way; `torch.save` writes into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.digest, self.size, self.sent = xxh3_128(), 0, 0
        self.problem: OSError | None = None
        self.helper = ThreadPoolExecutor(1)
        self.sending: Future[None] | None = None

    def __enter__(self) -> "HashedFile":
        self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        return self

    def write(self, data: Any) -> int:
        """Take the bytes of any buffer; each piece is hashed and written while the processor has it in its cache."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                self.digest.update(piece)
                written = 0
                while written < len(piece):
                    written += os.write(self.descriptor, piece[written:])
                self.size += written
                self.send_early()
        except OSError as problem:  # torch.save would speak of an "unexpected pos" instead
            problem.filename = str(self.path)
            self.problem = problem
            raise
        return len(view)

    def send_early(self) -> None:
        """Tell the disk to begin, from time to time; another thread waits for it."""
        if self.size - self.sent >= SENT_EARLY and (self.sending is None or self.sending.done()):
            self.sent = self.size
            self.sending = self.helper.submit(os.fdatasync, self.descriptor)

    def flush(self) -> None:
        """Nothing is held back."""

    def entry(self) -> FileEntry:
        """Size and hash; when this returns, the disk has the file."""
        os.fsync(self.descriptor)
        return FileEntry(self.size, self.digest.hexdigest())

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.helper.shutdown()
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
    """The entry of a file that someone else wrote, once the disk has it; hashed while the disk is busy."""
    with ThreadPoolExecutor(1) as helper:
        durable = helper.submit(make_durable, path)
        entry = hash_file(path)
        durable.result()
    return entry


def all_at_once(tasks: Sequence[Task], meanwhile: Callable[[], Sequence[Task]] = list) -> dict[str, FileEntry]:
    """The entries of all tasks, some of which run at the same time; when one fails, those that have not begun are left
    out.

    Args:
        meanwhile: runs in the calling thread, to its end whatever fails; gives tasks for which it was needed.
    """
    with ThreadPoolExecutor(WRITTEN_AT_ONCE) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            futures += [pool.submit(task) for task in meanwhile()]
            return {path: entry for future in futures for path, entry in future.result().items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
