"""parquet: one row, one document; only the columns that the text is made of are read, and row groups can be read
apart."""

import sys
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.opening import BUFFER, REMOTE_BUFFER, is_url, open_random
from cpt.data.readers.tables import read_batch
from cpt.data.readers.values import check_columns, columns_of, first_line
from cpt.recipe.schema import DocumentSource

BATCH = 1000


def read_parquet(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The rows of a piece's row groups."""
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
    """The row groups that begin in the piece."""
    begins, at = [], 0
    for group in range(metadata.num_row_groups):
        at = max(
            at, first_byte(metadata.row_group(group))
        )  # in order, as their rows are, even if a writer had them lie otherwise
        begins.append(at)
    stop = sys.maxsize if piece.stop is None else piece.stop
    return range(sum(begin < piece.start for begin in begins), sum(begin < stop for begin in begins))


def first_byte(group: pq.RowGroupMetaData) -> int:
    """Where a row group begins in the file."""
    if not group.num_columns:
        return 0
    column = group.column(0)
    return int(min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset))
