"""parquet: one row, one document; only the columns that the text is made of are read, and row groups can be read apart."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.opening import compression_of, is_url, open_random
from cpt.data.readers.tables import read_batch
from cpt.data.readers.values import check_columns, columns_of, first_line
from cpt.recipe.schema import DocumentSource

BATCH = 1000


def read_parquet(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The rows of a piece's row groups."""
    origin, whole = Origin(piece.path, "row"), Origin(piece.path, "document")
    num_rows = number = 0
    try:
        with pq.ParquetFile(open_random(piece.path)) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            groups = range(piece.start, len(sizes) if piece.stop is None else piece.stop)
            first, num_rows = sum(sizes[: groups.start]), sum(sizes[group] for group in groups)
            if not sum(sizes):
                detail = f"a parquet file without rows. Expected documents in the column `{columns_of(source)[0]}`"
                yield BadRow("no rows", detail, whole, 1)
                return
            check_columns(file.schema_arrow.names, source)
            for batch in file.iter_batches(BATCH, row_groups=list(groups), columns=list(columns_of(source))):
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


def row_groups(path: str, piece_bytes: int) -> list[tuple[int, int | None]]:
    """Ranges of row groups of about `piece_bytes` each; the whole file where it cannot be told, its reader will say why."""
    if is_url(path) or compression_of(path):
        return [(0, None)]
    try:
        with pq.ParquetFile(path) as file:
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    except (pa.ArrowException, OSError):
        return [(0, None)]
    ranges: list[tuple[int, int | None]] = []
    start = held = 0
    for group, size in enumerate(sizes):
        held += size
        if held >= piece_bytes:
            ranges.append((start, group + 1))
            start, held = group + 1, 0
    if start < len(sizes) or not ranges:
        ranges.append((start, len(sizes) if ranges else None))
    return ranges
