"""txt and md: a file is a document, or each line is, or what stands between separators."""

from collections.abc import Iterator
from typing import BinaryIO

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.lines import KEPT_OF_LONG_LINE, LONGEST_LINE, LongLine, lines_of, refuse_long
from cpt.data.readers.opening import BOM, BUFFER, open_file
from cpt.data.readers.values import decode
from cpt.recipe.schema import DocumentSource


def read_text(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The documents of a file, to the byte; lines lose only their end."""
    if source.text_documents == "line":
        yield from read_text_lines(piece)
        return
    with open_file(piece.path) as file:
        if source.text_documents == "file":
            raw = file.read(LONGEST_LINE + 1)
            yield document_of(shortened(raw.removeprefix(BOM), len(raw)), Origin(piece.path, "document"), 1, 0)
            return
        origin = Origin(piece.path, "item")
        for number, (byte, part) in enumerate(split(file, source.text_documents.encode()), start=1):
            if part.strip():
                yield document_of(part, origin, number, byte)


def split(file: BinaryIO, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """What stands between separators, with where each part begins, without a byte order mark; of the file no more is
    held than one part."""
    held, at, dropped, searched = (
        bytearray(),
        0,
        0,
        0,
    )  # the part so far; where it begins; what of it is held no more; what is no separator
    while block := file.read(BUFFER):
        held += block
        while (end := held.find(separator, searched)) >= 0:
            yield at, shortened(bytes(held[:end]).removeprefix(b"" if at else BOM), dropped + end)
            at += dropped + end + len(separator)
            del held[: end + len(separator)]
            dropped = searched = 0
        searched = max(0, len(held) - len(separator) + 1)
        if dropped + searched > LONGEST_LINE:
            dropped += searched - KEPT_OF_LONG_LINE
            del held[KEPT_OF_LONG_LINE:searched]
            searched = KEPT_OF_LONG_LINE
    yield at, shortened(bytes(held).removeprefix(b"" if at else BOM), dropped + len(held))


def shortened(raw: bytes, num_bytes: int) -> bytes:
    """A document as it is, or what is kept of one that is too long."""
    return raw if num_bytes <= LONGEST_LINE else LongLine(raw[:KEPT_OF_LONG_LINE] + b"...")


def read_text_lines(piece: Piece) -> Iterator[Document | BadRow]:
    """Each line that is not blank."""
    origin, lines = lines_of(piece)
    for number, byte, line in lines:
        if line.strip():
            yield document_of(line if isinstance(line, LongLine) else line.rstrip(b"\r\n"), origin, number, byte)


def document_of(raw: bytes, origin: Origin, number: int, byte: int) -> Document | BadRow:
    """Bytes as a document."""
    try:
        refuse_long(raw)
        return Document(decode(raw), origin, number)
    except BadValue as bad:
        return BadRow(bad.reason, bad.detail, origin, number, byte + (bad.byte or 0), raw)
