"""The lines of a piece of a file, with where each begins."""

import sys
from collections.abc import Iterator

from cpt.data.documents import Origin, Piece
from cpt.data.readers.opening import BOM, open_file

Lines = Iterator[tuple[int, int, bytes]]  # number within the piece, from 1; first byte in the file; the line with its end


def lines_of(piece: Piece) -> tuple[Origin, Lines]:
    """The lines whose first byte lies in the piece, without a byte order mark."""
    if piece.start == 0:
        return Origin(piece.path, "line"), read_lines(piece, 0)
    with open_file(piece.path) as file:
        file.seek(piece.start - 1)  # what stands there is the end of the line before, or part of a line that began before this piece
        begin = piece.start - 1 + len(file.readline())
    return Origin(piece.path, "line", begin), read_lines(piece, begin)


def read_lines(piece: Piece, begin: int) -> Lines:
    """From the first byte of a line on."""
    at, stop = begin, sys.maxsize if piece.stop is None else piece.stop
    with open_file(piece.path) as file:
        if begin:
            file.seek(begin)
        for number, line in enumerate(file, start=1):
            if at >= stop:
                return
            yield number, at, line if at else line.removeprefix(BOM)
            at += len(line)
