"""Which reader reads which file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cpt.data.documents import BadRow, Document, Piece
from cpt.data.readers.arrow import read_arrow
from cpt.data.readers.delimited import read_delimited
from cpt.data.readers.json_documents import read_json
from cpt.data.readers.json_lines import read_json_lines
from cpt.data.readers.opening import COMPRESSED, compression_of, format_of, is_url
from cpt.data.readers.parquet import read_parquet
from cpt.data.readers.texts import read_text
from cpt.recipe.schema import DocumentSource

Reader = Callable[[Piece, DocumentSource], Iterator[Document | BadRow]]
READERS: dict[str, Reader] = {
    ".txt": read_text,
    ".md": read_text,
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_delimited,
    ".tsv": read_delimited,
    ".arrow": read_arrow,
}
TEXTS = (".txt", ".md")
KNOWN = f"{', '.join(READERS)}, or one of these with {' or '.join(COMPRESSED)}"


@dataclass(frozen=True)
class Range:
    """Where a piece of a file begins and ends."""

    start: int = 0
    stop: int | None = None


def ranges_of(path: str, size: int, source: DocumentSource, piece_bytes: int) -> list[Range]:
    """How a file is cut, so that processes can read it together: by its size alone, and not at all where it can be
    read only as a whole."""
    if size <= piece_bytes or compression_of(path) or not can_be_cut(path, source):
        return [Range()]
    starts = [*range(0, size, piece_bytes)]
    return [Range(start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]


def can_be_cut(path: str, source: DocumentSource) -> bool:
    """True where a part of the file can be found without reading what stands before."""
    if format_of(path) in TEXTS:
        return source.text_documents == "line"
    return format_of(path) in (".jsonl", ".parquet") or format_of(path) == ".arrow" and not is_url(path)
