"""Open a source of the recipe as documents: which files it means, in which pieces they can be read, and what stands in
them."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa

from cpt.data.readers.documents import BadRow as BadRow
from cpt.data.readers.documents import Document as Document
from cpt.data.readers.documents import Origin, complaint
from cpt.data.readers.documents import Piece as Piece
from cpt.data.readers.files import cannot_read, files_of, tell_formats
from cpt.data.readers.files import hash_file as hash_file
from cpt.data.readers.files import kind_of as kind_of
from cpt.data.readers.files import states_of as states_of
from cpt.data.readers.formats import READERS, TEXTS, can_be_cut, read_function
from cpt.data.readers.forms import refuse_texts
from cpt.data.readers.hub import fetch, hub_files, read_hub
from cpt.data.readers.opening import format_of, is_url, is_whole, size_of
from cpt.data.readers.values import first_line
from cpt.errors import DataError
from cpt.recipe.schema import DocumentSource

PIECE_BYTES = 64 * 2**20


def open_source(source: DocumentSource, key: str) -> Iterator[Document]:
    """The documents in the order of the files' names, at most `max_documents`.

    Args:
        key: where the source stands in the recipe, for messages: `data.sources[0]`.
    """
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


def files_with_sizes(source: DocumentSource, key: str) -> list[tuple[str, int]]:
    """The names of a source's files and their sizes in bytes, from one listing; none of what is no file."""
    return [(file.name, file.size) for file in files_of(source, key)]


def read_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    """The documents of a piece and its bad rows, in order.

    What a row is read into is decided here; what becomes of bad ones by `bad_rows.apply_policy`. `max_documents`
    counts over all pieces, so it is up to the caller; a piece gives no more than it.
    """
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
    """The documents of a piece of a file on the Hub, which is fetched as a whole or, where nothing is to be kept of
    it, in parts.

    A dataset that is not read file by file is one piece.
    """
    if piece.path == source.path:
        return read_hub(source, key, hub_files(source, key).commit)
    if source.streaming or source.max_documents is not None:  # of which the first piece may be enough
        return read_file_piece(source, piece, key)
    return read_file_piece(source, replace(piece, path=fetch(piece.path, key)), key)


def read_file_piece(source: DocumentSource, piece: Piece, key: str) -> Iterator[Document | BadRow]:
    if format_of(piece.path) in TEXTS:
        refuse_texts(source, format_of(piece.path), key)
    whole = Origin(piece.path, "document")
    try:
        is_one_of_many = format_of(piece.path) in TEXTS and Path(piece.path) != Path(source.path).expanduser()
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
