"""The lines of a piece of a file, with where each begins."""

import sys
from collections.abc import Iterator
from typing import BinaryIO

from cpt.data.documents import BadValue, Origin, Piece
from cpt.data.readers.opening import BOM, BUFFER, open_file

LONGEST_LINE = 64 * 2**20
KEPT_OF_LONG_LINE = 1000
Lines = Iterator[
    tuple[int, int, bytes]
]  # number, counted from the origin; first byte in the file; the line with its end


class LongLine(bytes):
    """What is kept of a line too long for the memory: its beginning and an ellipsis, which together are no JSON."""


def lines_of(piece: Piece) -> tuple[Origin, Lines]:
    """The lines whose first byte lies in the piece, without a byte order mark."""
    before = max(
        0, piece.start - 1
    )  # what stands there is the end of a line, or part of one that began before this piece
    return Origin(piece.path, "line", before), read_lines(piece, before)


def read_lines(piece: Piece, at: int) -> Lines:
    """Go through the lines from a byte on; what stands there before the piece counts as one."""
    number, stop = 0, sys.maxsize if piece.stop is None else piece.stop
    with open_file(piece.path, at, piece.stop) as file:
        if piece.start:
            at, number = pass_over(file, at, stop), 1
        while at < stop and (line := file.readline(LONGEST_LINE + 1)):
            begin, number, at = at, number + 1, at + len(line)
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                line = LongLine(line[:KEPT_OF_LONG_LINE] + b"...")
                at = pass_over(file, at, stop)
            elif not begin:
                line = line.removeprefix(BOM)
            yield number, begin, line


def pass_over(file: BinaryIO, at: int, stop: int) -> int:
    """The byte after the end of a line, or one after `stop` where it does not end before: then nothing more begins
    before it either."""
    while at < stop and (part := file.readline(BUFFER)):
        at += len(part)
        if part.endswith(b"\n"):
            break
    return at


def refuse_long(raw: bytes) -> None:
    """A line, or another document, that is too long has not been read.

    Raises:
        BadValue: always for such a one.
    """
    if isinstance(raw, LongLine):
        raise BadValue("too long", f"longer than the {LONGEST_LINE:,} bytes that one document may have; is it one?")
