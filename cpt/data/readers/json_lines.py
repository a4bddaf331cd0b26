"""jsonl: one JSON object a line; blank lines, CRLF and a byte order mark are fine."""

from collections.abc import Iterator
from typing import Any

import orjson

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.lines import lines_of, refuse_long
from cpt.data.readers.opening import is_whole
from cpt.data.readers.values import columns_of, decode, document_of, kind
from cpt.recipe.schema import DocumentSource


def read_json_lines(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The rows of a piece."""
    origin, lines = lines_of(piece)
    column = (
        source.text_column
        if columns_of(source) == (source.text_column,) and source.template is None and source.chat is None
        else None
    )
    is_empty = True
    for number, byte, line in lines:
        try:  # most rows are good, and there are billions of them
            text = None if column is None else orjson.loads(line)[column]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        if type(text) is str and "\0" not in text:
            yield Document(text, origin, number)
        elif line.strip():
            yield read_row(line, source, origin, number, byte)
        else:
            continue
        is_empty = False
    if is_empty and is_whole(piece):
        detail = f"no rows, only blank lines. Expected one JSON object a line with the key `{columns_of(source)[0]}`"
        yield BadRow("no rows", detail, origin, 1)


def read_row(line: bytes, source: DocumentSource, origin: Origin, number: int, byte: int) -> Document | BadRow:
    """A row that takes a closer look."""
    try:
        return document_of(parse_object(line, columns_of(source)[0]), source, origin, number)
    except BadValue as bad:
        return BadRow(bad.reason, bad.detail, origin, number, byte + (bad.byte or 0), line)


def parse_object(line: bytes, column: str) -> dict[str, Any]:
    """The object that stands in a line."""
    refuse_long(line)
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        raise why_not_json(line, problem) from problem
    if not isinstance(row, dict):
        raise BadValue("not an object", f"{kind(row)}, expected a JSON object with the key `{column}`")
    return row


def why_not_json(raw: bytes, problem: orjson.JSONDecodeError) -> BadValue:
    """Say which of the usual things is wrong with JSON."""
    try:
        text = decode(raw)  # orjson does not tell which byte is not UTF-8
    except BadValue as bad:
        return bad
    byte = len(text[: problem.pos].encode())
    what = f"not valid JSON: {{}}, at character {problem.pos}"
    if "surrogate" in problem.msg:
        return BadValue("lone surrogate", what.format("a lone surrogate (half of a character)"), byte)
    if text[problem.pos :].lstrip("-").startswith(("NaN", "Infinity")) or text[max(0, problem.pos - 1) :].startswith(
        ("-Infinity", "-NaN")
    ):
        return BadValue("NaN or Infinity", what.format("NaN and Infinity are no JSON (write null)"), byte)
    if not raw.endswith((b"\n", b"}", b"]")):
        return BadValue("cut off", what.format(f"{problem.msg} (the file ends in the middle of the row)"), byte)
    return BadValue("not valid JSON", what.format(problem.msg), byte)
