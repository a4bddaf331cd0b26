"""Which reader reads which file, and a user's own function as a source."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from cpt.data.readers.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.opening import COMPRESSED, compression_of, format_of
from cpt.data.readers.tables import read_arrow, read_parquet
from cpt.data.readers.text_formats import read_delimited, read_json, read_json_lines, read_text
from cpt.data.readers.values import clean, document_of, kind, refuse_surrogates
from cpt.errors import CptError, RecipeError
from cpt.extend import check_options, find, user_code_error
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


def can_be_cut(path: str, source: DocumentSource) -> bool:
    """True where a part of the file can be read without what stands before it; not every HTTP server gives parts."""
    if compression_of(path) or path.startswith(("http://", "https://")):
        return False
    if format_of(path) in TEXTS:
        return source.text_documents == "line"
    return format_of(path) in (".jsonl", ".parquet")


# --- function ---


NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*")


def is_function(path: str) -> bool:
    """True for `package.module:function`, unless a file is called so."""
    return NAME.fullmatch(path) is not None and not Path(path).exists()


def find_function(source: DocumentSource, key: str) -> Callable[..., Any]:
    """The function, with its options checked."""
    function = find("source", source.path, {})
    check_options(function, source.options, f"{key}.options")
    return function


def call_function(source: DocumentSource, key: str) -> Iterable[object]:
    """What the function gives for the recipe's options."""
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
