"""Read parquet and arrow."""

import io
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
    try:
        return value.as_py()
    except UnicodeDecodeError as problem:
        raise BadValue("invalid UTF-8", f"invalid UTF-8 at byte {problem.start} of the text") from problem


def as_bytes(value: pa.Scalar) -> object:
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
Batches = Iterator[tuple[int, int, pa.RecordBatch]]  # where it begins; rows of the file before it; the batch


def read_arrow(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    whole = Origin(piece.path, "document")
    batches = batches_of(piece.path)
    num_rows = 0  # of the file so far
    try:
        for before, batch in of_piece(piece, batches):
            num_rows = before
            check_columns(batch.schema.names, source)
            yield from read_batch(batch, source, Origin(piece.path, "row"), before)
            num_rows += batch.num_rows
    except BadValue as bad:
        num_lost = batch.num_rows + sum(batch.num_rows for _, batch in of_piece(piece, batches))
        yield BadRow(bad.reason, bad.detail, whole, 1, num_rows=max(1, num_lost))
    except (pa.ArrowException, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise
        yield BadRow(
            "damaged file",
            f"cannot be read as arrow ({first_line(problem)}); what follows row {num_rows} is lost",
            whole,
            1,
        )
    else:
        if not num_rows and piece.start == 0 and not any(batch.num_rows for *_, batch in batches_of(piece.path)):
            yield BadRow(
                "no rows",
                f"an arrow file without rows. Expected documents in the column `{columns_of(source)[0]}`",
                whole,
                1,
            )


def of_piece(piece: Piece, batches: Batches) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batches that begin in a piece, each with the rows of the file before it."""
    stop = sys.maxsize if piece.stop is None else piece.stop
    for position, before, batch in batches:
        if position >= stop:
            return
        if position >= piece.start:
            yield before, batch


def batches_of(path: str) -> Batches:
    """All batches, in order; of a local file nothing is copied.

    A stream begins otherwise than a file. Where a file's batches begin is not to be had from pyarrow: they are taken
    as equally long.
    """
    found = open_random(path)
    file = pa.memory_map(found) if isinstance(found, str) else found
    before = 0
    with file:
        is_stream = file.read(len(MAGIC)) != MAGIC
        file.seek(0)
        if is_stream:
            position = 0
            for batch in pa.ipc.open_stream(file):
                yield position, before, batch
                position, before = file.tell(), before + batch.num_rows
            return
        reader, size = pa.ipc.open_file(file), file.seek(0, io.SEEK_END)
        for number in range(reader.num_record_batches):
            batch = reader.get_batch(number)
            yield number * size // reader.num_record_batches, before, batch
            before += batch.num_rows
