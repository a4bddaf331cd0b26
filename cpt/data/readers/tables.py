"""Rows of arrow's tables as documents."""

from collections.abc import Iterator

import pyarrow as pa

from cpt.data.documents import BadRow, BadValue, Document, Origin
from cpt.data.readers.values import columns_of, document_of
from cpt.recipe.schema import DocumentSource


def read_batch(
    batch: pa.RecordBatch, source: DocumentSource, origin: Origin, rows_before: int
) -> Iterator[Document | BadRow]:
    """The documents of a batch; its rows are numbered from `rows_before` + 1 on."""
    names = columns_of(source, batch.schema.names)
    try:
        columns: list[list[object]] = [batch.column(name).to_pylist() for name in names]
        if source.chat is not None:
            columns = [[without_nulls(value) for value in column] for column in columns]
    except UnicodeDecodeError:
        yield from read_one_by_one(batch, source, origin, rows_before)
        return
    for number, values in enumerate(zip(*columns, strict=True), start=rows_before + 1):
        try:
            yield document_of(dict(zip(names, values, strict=True)), source, origin, number)
        except BadValue as bad:
            yield bad_row(bad, origin, number, dict(zip(names, values, strict=True)))


def read_one_by_one(
    batch: pa.RecordBatch, source: DocumentSource, origin: Origin, rows_before: int
) -> Iterator[Document | BadRow]:
    """As `read_batch`, where some text is no UTF-8, which arrow does not check before this."""
    columns = {name: batch.column(name) for name in columns_of(source, batch.schema.names)}
    for row in range(batch.num_rows):
        number = rows_before + row + 1
        values: dict[str, object] = {}
        try:
            for name, column in columns.items():
                values[name] = (
                    without_nulls(as_python(column[row])) if source.chat is not None else as_python(column[row])
                )
            yield document_of(values, source, origin, number)
        except BadValue as bad:
            raw = {name: as_bytes(column[row]) for name, column in columns.items()}
            yield bad_row(bad, origin, number, values if len(values) == len(columns) else raw)


def without_nulls(value: object) -> object:
    """Lists and objects without the keys that a table puts into each object because another one has them."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value


def as_python(value: pa.Scalar) -> object:
    """The value of a cell."""
    try:
        return value.as_py()
    except UnicodeDecodeError as problem:
        raise BadValue("invalid UTF-8", f"invalid UTF-8 at byte {problem.start} of the text") from problem


def as_bytes(value: pa.Scalar) -> object:
    """A cell as it lies there."""
    return value.as_buffer().to_pybytes() if isinstance(value, pa.StringScalar | pa.LargeStringScalar) else value


def bad_row(bad: BadValue, origin: Origin, number: int, values: dict[str, object]) -> BadRow:
    """A row of a table has no bytes of its own in the file; its values are kept as they print, a single text as it
    is."""
    only = next(iter(values.values())) if len(values) == 1 else values
    raw = (
        only
        if isinstance(only, bytes)
        else only.encode("utf-8", "surrogatepass")
        if isinstance(only, str)
        else repr(only).encode()
    )
    return BadRow(bad.reason, bad.detail, origin, number, raw=raw)
