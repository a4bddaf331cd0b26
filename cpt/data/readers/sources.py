"""Read a source of the recipe: its files, the pieces that they are read in, and the documents in them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa

from cpt.data.readers.documents import BadRow as BadRow
from cpt.data.readers.documents import BadValue, Origin, complaint
from cpt.data.readers.documents import Document as Document
from cpt.data.readers.documents import Piece as Piece
from cpt.data.readers.files import cannot_read, files_of, tell_formats
from cpt.data.readers.files import hash_file as hash_file
from cpt.data.readers.files import kind_of as kind_of
from cpt.data.readers.files import states_of as states_of
from cpt.data.readers.forms import refuse_texts
from cpt.data.readers.hub import fetch, hub_files, read_hub
from cpt.data.readers.opening import compression_of, format_of, is_url, is_whole, size_of
from cpt.data.readers.tables import read_arrow, read_parquet
from cpt.data.readers.text_formats import read_delimited, read_json, read_json_lines, read_text
from cpt.data.readers.values import clean, document_of, first_line, kind, refuse_surrogates
from cpt.errors import CptError, DataError, RecipeError
from cpt.plugins import check_options, find, user_code_error
from cpt.recipe.paths import TEXT_FILES
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
PIECE_BYTES = 64 * 2**20


def open_source(source: DocumentSource, key: str) -> Iterator[Document]:
    """The documents in the order of the files' names, at most `max_documents`."""
    number = 0
    for piece in pieces_of(source, key):
        for item in read_piece(source, piece, key):
            if isinstance(item, BadRow):
                raise DataError(complaint(item, key))
            yield item
            number += 1
            if number == source.max_documents:
                return


def pieces_of(source: DocumentSource, key: str, piece_bytes: int = PIECE_BYTES) -> list[Piece]:
    """The source in pieces that can be read apart from each other; their documents, one after the other, are the
    source's.

    They follow from the names and sizes of the files, of which none is opened. A user's function, and a dataset on
    the Hub that is not read file by file, are one piece, for the main process.
    """
    files = files_with_sizes(source, key)
    if not files:
        return [Piece(source.path, 0, None, 0)]
    tell_formats(source)
    pieces: list[Piece] = []
    for file, size in files:
        starts = range(0, size, piece_bytes) if size > piece_bytes and can_be_cut(file, source) else range(1)
        for start, stop in zip_longest(starts, starts[1:]):
            pieces.append(Piece(file, start, stop, len(pieces)))
    return pieces


def can_be_cut(path: str, source: DocumentSource) -> bool:
    """True if a part of the file can be read without the bytes before it; not every HTTP server allows that."""
    if compression_of(path) or path.startswith(("http://", "https://")):
        return False
    if format_of(path) in TEXT_FILES:
        return source.text_documents == "line"
    return format_of(path) in (".jsonl", ".parquet")


def files_with_sizes(source: DocumentSource, key: str) -> list[tuple[str, int]]:
    """The names of a source's files and their sizes in bytes, from one listing; empty for functions."""
    return [(file.name, file.size) for file in files_of(source, key)]


def read_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    """The documents of a piece and its bad rows, in order; no more documents than `max_documents`."""
    if kind_of(source.path) == "hub":
        items = read_hub_piece(source, piece, key)
    elif kind_of(source.path) == "function":
        items = read_function(source, key)
    else:
        items = read_file_piece(source, piece, key)
    if source.max_documents is None:
        yield from items
        return
    documents = 0
    for item in items:
        yield item
        documents += isinstance(item, Document)
        if documents == source.max_documents:
            return


def read_hub_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    """The documents of a piece of a file on the Hub, which is fetched as a whole, or in parts where none of it is
    kept."""
    if piece.path == source.path:
        return read_hub(source, key, hub_files(source, key).commit)
    if source.streaming or source.max_documents is not None:  # of which the first piece may be enough
        return read_file_piece(source, piece, key)
    return read_file_piece(source, replace(piece, path=fetch(piece.path, key)), key)


def read_file_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    if format_of(piece.path) in TEXT_FILES:
        refuse_texts(source, format_of(piece.path), key)
    whole = Origin(piece.path, "document")
    try:
        is_one_of_many = format_of(piece.path) in TEXT_FILES and Path(piece.path) != Path(source.path).expanduser()
        if is_whole(piece) and not is_one_of_many and size_of(piece.path) == 0:
            yield BadRow("empty file", "the file is empty, expected documents", whole, 1)
            return
        yield from READERS[format_of(piece.path)](piece, source)
    except (OSError, pa.ArrowException) as problem:
        if isinstance(problem, OSError) and (
            problem.errno or is_url(piece.path) and not isinstance(problem, pa.ArrowException)
        ):
            raise cannot_read(piece.path, problem, key) from problem
        # A compressed file that is cut off or damaged.
        yield BadRow(
            "damaged file", f"cannot be read to its end ({first_line(problem)}); the rest of it is lost", whole, 1
        )


# --- a function of the user's ---


def find_function(source: DocumentSource, key: str) -> Callable[..., Any]:
    """The function, with its options checked."""
    function = find("source", source.path, {})
    check_options(function, source.options, f"{key}.options")
    return function


def call_function(source: DocumentSource, key: str) -> Iterable[object]:
    """The rows that the function returns for the recipe's options."""
    rows: object = find_function(source, key)(**source.options)
    if isinstance(rows, str | Mapping) or not (isinstance(rows, Iterable) or hasattr(rows, "__getitem__")):
        raise RecipeError(
            f"`{key}.path`: {source.path} gave {kind(rows)}. It must give texts or rows to go through: a list, a"
            " generator."
        )
    return rows  # type: ignore[return-value]


def read_function(source: DocumentSource, key: str) -> Iterator[Document | BadRow]:
    """The documents in the order in which the function gives them."""
    origin = Origin(source.path, "item")
    rows = iter(call_function(source, key))
    for number in count(1):
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as problem:
            if isinstance(problem, CptError):
                raise
            raise user_code_error(f"{origin.where(number)}: the source `{source.path}`", problem) from problem
        try:
            if not isinstance(row, str | Mapping):
                raise BadValue(
                    "wrong type", f"{kind(row)}, expected a text or a row with the key `{source.text_column}`"
                )
            if isinstance(row, str):
                document = Document(clean(row, "text"), origin, number)
            else:
                document = document_of(row, source, origin, number)
            refuse_surrogates(document.text)
            yield document
        except BadValue as bad:
            yield BadRow(bad.reason, bad.detail, origin, number)
