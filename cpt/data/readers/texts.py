"""txt and md: a file is a document, or each line is, or what stands between separators."""

from collections.abc import Iterator

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.lines import lines_of
from cpt.data.readers.opening import BOM, open_file
from cpt.data.readers.values import decode
from cpt.recipe.schema import DocumentSource


def read_text(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The documents of a file, to the byte; lines lose only their end."""
    if source.text_documents == "line":
        yield from read_text_lines(piece)
        return
    with open_file(piece.path) as file:
        raw = file.read().removeprefix(BOM)
    if source.text_documents == "file":
        yield document_of(raw, Origin(piece.path, "document"), 1, 0)
        return
    origin, byte = Origin(piece.path, "item"), 0
    separator = source.text_documents.encode()
    for number, part in enumerate(raw.split(separator), start=1):
        if part.strip():
            yield document_of(part, origin, number, byte)
        byte += len(part) + len(separator)


def read_text_lines(piece: Piece) -> Iterator[Document | BadRow]:
    """Each line that is not blank."""
    origin, lines = lines_of(piece)
    for number, byte, line in lines:
        if line.strip():
            yield document_of(line.rstrip(b"\r\n"), origin, number, byte)


def document_of(raw: bytes, origin: Origin, number: int, byte: int) -> Document | BadRow:
    """Bytes as a document."""
    try:
        return Document(decode(raw), origin, number)
    except BadValue as bad:
        return BadRow(bad.reason, bad.detail, origin, number, byte + (bad.byte or 0), raw)
