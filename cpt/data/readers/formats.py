"""Which reader reads which file."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cpt.data.documents import BadRow, Document, Piece
from cpt.data.readers.arrow import read_arrow
from cpt.data.readers.delimited import read_delimited
from cpt.data.readers.json_documents import read_json
from cpt.data.readers.json_lines import read_json_lines
from cpt.data.readers.opening import COMPRESSED, compression_of, format_of, is_url
from cpt.data.readers.parquet import read_parquet, row_groups
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
    """How a file is cut, so that processes can read it together: between lines, between row groups, or not at all."""
    if format_of(path) == ".parquet":
        return [Range(*both) for both in row_groups(path, piece_bytes)]
    has_lines = format_of(path) == ".jsonl" or format_of(path) in TEXTS and source.text_documents == "line"
    if not has_lines or is_url(path) or compression_of(path) or size <= piece_bytes:
        return [Range()]
    starts = [*range(0, size, piece_bytes)]
    return [Range(start, stop) for start, stop in zip(starts, [*starts[1:], None], strict=True)]
