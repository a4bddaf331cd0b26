"""Small files that a run writes while it trains: a disk that is full or read-only costs a warning, never the run and
never the file."""

import errno
import json
import logging
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from cpt.files import DAMAGED
from cpt.runs.folder import parse_object

log = logging.getLogger("cpt")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
BLOCK = 512  # bytes, what st_blocks counts in


class LinesFile:
    """Appends lines to a file; what the disk does not take waits in memory, and goes in its order before the next one.

    Threads may share it, and other processes may append to the same file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[str] = []
        self.lock = threading.Lock()

    def add(self, line: str) -> None:
        """Write the line, or warn that it has to wait."""
        with self.lock:
            self.waiting.append(f"{line}\n")
            if problem := self.problem_in_writing():
                log.warning("%s cannot be written: %s. Its lines wait for the next one.", self.path, problem.strerror)

    def write_waiting(self) -> int:
        """Try again where lines wait; how many still do. It costs nothing where none does."""
        with self.lock:
            self.problem_in_writing()
            return len(self.waiting)

    def problem_in_writing(self) -> OSError | None:
        """Write all that waits, or tell why not."""
        if not self.waiting:
            return None
        try:
            append(self.path, "".join(self.waiting))
        except OSError as problem:
            return problem
        self.waiting.clear()
        return None


def append(path: Path, text: str) -> None:
    """Append all of the text in one write, so that lines of several processes do not mix, or nothing of it.

    A line that a crash cut off before it is ended first.

    Raises:
        OSError: there is no room, or no right to write.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        is_cut_off = size > 0 and os.pread(descriptor, 1, size - 1) not in (b"\n", b"")
        content = b"\n" * is_cut_off + text.encode()
        written = os.write(descriptor, content)
        if written < len(content):
            end = os.lseek(descriptor, 0, os.SEEK_CUR)
            if os.fstat(descriptor).st_size == end:  # else another process ends the half line
                os.ftruncate(descriptor, end - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Write the file whole or not at all; on a full disk into the place that it has already, where that is enough.

    Raises:
        OSError: it is not, or there is no right to write.
    """
    beside = path.with_name(
        f".{path.name}.{socket.gethostname()}-{os.getpid()}"
    )  # in containers all hosts have the same few numbers
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as problem:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        if problem.errno not in NO_ROOM or not overwrite(path, text.encode()):
            raise


def overwrite(path: Path, content: bytes) -> bool:
    """Put the content where the file is, if it has the room; whether it had."""
    if not path.exists():
        return False
    descriptor = os.open(path, os.O_WRONLY)
    try:
        held = os.fstat(descriptor)
        if len(content) > max(held.st_size, held.st_blocks * BLOCK):
            return False
        # Blank to its old end, so that it is whole in each moment.
        os.pwrite(descriptor, content.ljust(held.st_size, b"\n"), 0)
        os.ftruncate(descriptor, len(content))
    finally:
        os.close(descriptor)
    return True


def keep_lines_until(path: Path, step: int) -> None:
    """Keep the lines of a JSONL file whose `step` is not after `step`.

    Raises:
        OSError: the file cannot be changed; it is as it was.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if is_until(line, step)]
    if damaged := sum(parse_object(line.encode()) is None for line in lines if line.endswith("\n")):
        log.warning(f"{path}: {damaged:,} damaged line(s) are removed.", extra={"event": DAMAGED})
    if kept == lines[: len(kept)]:  # as always but for lines added by hand: shorter needs no room
        os.truncate(path, len("".join(kept).encode()))
    else:
        write_whole(path, "".join(kept))


def is_until(line: str, step: int) -> bool:
    """Whether it is a whole line, of a step that is not after `step`."""
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):  # a damaged line
        return False
