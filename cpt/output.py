"""Output that cannot end a command: characters that the terminal's encoding lacks, an output that is closed, full or
no longer read."""

import os
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import Any


class LossyFile(FileIO):
    """A file descriptor whose write errors are ignored: its reader is gone, or its disk is full."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes


def make_output_safe(outlives_readers: bool = False) -> None:
    """Replace characters that the terminal's encoding lacks, and accept closed outputs.

    Args:
        outlives_readers: also ignore write errors of stdout; those of stderr are always ignored, as they could not be
            reported.
    """
    for number in (
        1,
        2,
    ):  # a closed descriptor would become the next socket, here or in a child, and what is printed would go there
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.set_inheritable(number, True)
            if nowhere != number:
                os.close(nowhere)
    if not (sys.stdout and sys.stderr):  # `>&-`: Python has None there
        dropped = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        sys.stdout, sys.stderr = sys.stdout or dropped, sys.stderr or dropped
    sys.stderr = reopened(sys.stderr, "backslashreplace", is_lossy=True)
    sys.stdout = reopened(sys.stdout, "replace", is_lossy=outlives_readers)


def reopened(stream: Any, errors: str, *, is_lossy: bool) -> Any:
    """The same stream with other rules for characters and for write errors."""
    if not isinstance(stream, TextIOWrapper):
        return stream
    stream.reconfigure(errors=errors)
    raw = getattr(stream.buffer, "raw", stream.buffer)
    if not is_lossy or type(raw) is not FileIO:
        return stream
    lossy = BufferedWriter(LossyFile(raw.fileno(), "w", closefd=False))
    with suppress(OSError):
        stream.flush()
    return TextIOWrapper(
        lossy,
        stream.encoding,
        errors,
        line_buffering=stream.line_buffering,
        write_through=isinstance(stream.buffer, FileIO),
    )
