"""Read parquet and arrow."""

import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.data.readers.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.opening import BUFFER, REMOTE_BUFFER, is_url, open_random
from cpt.data.readers.values import check_columns, columns_of, document_of, first_line
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
            yield BadRow(bad.reason, bad.detail, origin, number)


def read_one_by_one(
    batch: pa.RecordBatch, source: DocumentSource, origin: Origin, rows_before: int
) -> Iterator[Document | BadRow]:
    """As `read_batch`, where some text is no UTF-8, which arrow does not check before this."""
    columns = {name: batch.column(name) for name in columns_of(source, batch.schema.names)}
    for row in range(batch.num_rows):
        number = rows_before + row + 1
        try:
            values = {name: as_python(column[row]) for name, column in columns.items()}
            if source.chat is not None:
                values = {name: without_nulls(value) for name, value in values.items()}
            yield document_of(values, source, origin, number)
        except BadValue as bad:
            yield BadRow(bad.reason, bad.detail, origin, number)


def without_nulls(value: object) -> object:
    """Lists and objects without the keys that a table puts into each object because another one has them."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value


def as_python(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as problem:
        raise BadValue("invalid UTF-8", f"invalid UTF-8 at byte {problem.start} of the text") from problem


# --- parquet ---


BATCH = 1000


def read_parquet(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    origin, whole = Origin(piece.path, "row"), Origin(piece.path, "document")
    num_rows = number = 0
    try:
        # Not a whole row group at once, which may be the whole file.
        buffer = REMOTE_BUFFER if is_url(piece.path) else BUFFER
        with pq.ParquetFile(open_random(piece.path), pre_buffer=False, buffer_size=buffer) as file:
            groups = groups_of(piece, file.metadata)
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            first, num_rows = sum(sizes[: groups.start]), sum(sizes[group] for group in groups)
            if not sum(sizes) and piece.start == 0:
                detail = f"a parquet file without rows. Expected documents in the column `{columns_of(source)[0]}`"
                yield BadRow("no rows", detail, whole, 1)
            if not num_rows:
                return
            check_columns(file.schema_arrow.names, source)
            columns = list(columns_of(source, file.schema_arrow.names))
            for batch in file.iter_batches(BATCH, row_groups=list(groups), columns=columns):
                yield from read_batch(batch, source, origin, first + number)
                number += batch.num_rows
    except BadValue as bad:
        yield BadRow(bad.reason, bad.detail, whole, 1, num_rows=max(1, num_rows))
    except (pa.ArrowException, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise
        lost = f" {num_rows - number:,} rows are lost." if num_rows else ""
        detail = f"cannot be read as parquet ({first_line(problem)}){lost.rstrip('.')}"
        yield BadRow("damaged file", detail, whole, 1, num_rows=max(1, num_rows - number))


def groups_of(piece: Piece, metadata: pq.FileMetaData) -> range:
    begins, at = [], 0
    for group in range(metadata.num_row_groups):
        at = max(
            at, first_byte(metadata.row_group(group))
        )  # in order, as their rows are, even if a writer had them lie otherwise
        begins.append(at)
    stop = sys.maxsize if piece.stop is None else piece.stop
    return range(sum(begin < piece.start for begin in begins), sum(begin < stop for begin in begins))


def first_byte(group: pq.RowGroupMetaData) -> int:
    if not group.num_columns:
        return 0
    column = group.column(0)
    return int(min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset))


# --- arrow ---


MAGIC = b"ARROW1"


def read_arrow(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    origin, whole = Origin(piece.path, "row"), Origin(piece.path, "document")
    num_rows = 0  # so far
    try:
        for batch in batches_of(piece.path):
            check_columns(batch.schema.names, source)
            yield from read_batch(batch, source, origin, num_rows)
            num_rows += batch.num_rows
    except BadValue as bad:
        num_lost = sum(batch.num_rows for batch in batches_of(piece.path))
        yield BadRow(bad.reason, bad.detail, whole, 1, num_rows=max(1, num_lost))
    except (pa.ArrowException, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise
        detail = f"cannot be read as arrow ({first_line(problem)}); what follows row {num_rows} is lost"
        yield BadRow("damaged file", detail, whole, 1)
    else:
        if not num_rows:
            detail = f"an arrow file without rows. Expected documents in the column `{columns_of(source)[0]}`"
            yield BadRow("no rows", detail, whole, 1)


def batches_of(path: str) -> Iterator[pa.RecordBatch]:
    """All batches of a file or a stream, in order; of a local file nothing is copied."""
    found = open_random(path)
    with pa.memory_map(found) if isinstance(found, str) else found as file:
        is_file = file.read(len(MAGIC)) == MAGIC
        file.seek(0)
        if not is_file:
            yield from pa.ipc.open_stream(file)
            return
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
