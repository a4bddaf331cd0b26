"""json: a list of objects, or one object a file; what is jsonl under this name is read as that."""

from collections.abc import Iterator

import orjson

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.json_lines import read_json_lines, why_not_json
from cpt.data.readers.opening import BOM, open_file
from cpt.data.readers.values import columns_of, document_of, kind
from cpt.recipe.schema import DocumentSource


def read_json(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The objects of a file; it is in memory as a whole."""
    origin, whole = Origin(piece.path, "item"), Origin(piece.path, "document")
    with open_file(piece.path) as file:
        raw = file.read().removeprefix(BOM)
    try:
        rows = orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        if is_json_lines(raw):
            yield from read_json_lines(piece, source)
        else:
            bad = why_not_json(raw, problem)
            yield BadRow(bad.reason, bad.detail, whole, 1, bad.byte)
        return
    if not isinstance(rows, list):
        rows, origin = [rows], whole
    if not rows:
        yield BadRow("no rows", "an empty list, expected objects", whole, 1)
    for number, row in enumerate(rows, start=1):
        try:
            if not isinstance(row, dict):
                raise BadValue(
                    "not an object", f"{kind(row)}, expected a JSON object with the key `{columns_of(source)[0]}`"
                )
            yield document_of(row, source, origin, number)
        except BadValue as bad:
            yield BadRow(bad.reason, bad.detail, origin, number, raw=orjson.dumps(row))


def is_json_lines(raw: bytes) -> bool:
    """True where the first line is an object by itself."""
    first, _, rest = raw.lstrip().partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(orjson.loads(first), dict)
    except orjson.JSONDecodeError:
        return False
