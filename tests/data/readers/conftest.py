"""Read a file as a source of one piece, and tell documents from bad rows."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cpt.data.readers.documents import BadRow, Document
from cpt.data.readers.sources import pieces_of, read_piece
from cpt.recipe.schema import Source


@pytest.fixture
def read() -> Callable[..., list[Document | BadRow]]:
    """`read(path, template="{a}")`: everything that the reader gives."""

    def run(path: Path | str, **options: object) -> list[Document | BadRow]:
        source = Source(path=str(path), **options)
        return [item for piece in pieces_of(source, "k") for item in read_piece(source, piece, "k")]

    return run


@pytest.fixture
def texts(read: Callable[..., list[Document | BadRow]]) -> Callable[..., list[str]]:
    """The texts of a file without a bad row."""

    def run(path: Path | str, **options: object) -> list[str]:
        items = read(path, **options)
        assert not [item for item in items if isinstance(item, BadRow)]
        return [item.text for item in items]

    return run


@pytest.fixture
def bad(read: Callable[..., list[Document | BadRow]]) -> Callable[..., BadRow]:
    """The one bad row of a file."""

    def run(path: Path | str, **options: object) -> BadRow:
        (found,) = [item for item in read(path, **options) if isinstance(item, BadRow)]
        return found

    return run
