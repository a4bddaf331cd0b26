"""arrow: IPC files and streams, also those that `datasets` saves."""

from collections.abc import Iterator

import pyarrow as pa

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.opening import open_random
from cpt.data.readers.tables import read_batch
from cpt.data.readers.values import check_columns, columns_of, first_line
from cpt.recipe.schema import DocumentSource

MAGIC = b"ARROW1"


def read_arrow(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The rows of a file."""
    origin, whole = Origin(piece.path, "row"), Origin(piece.path, "document")
    number = 0
    batches = batches_of(piece.path)
    try:
        for batch in batches:
            bad = None if number else missing(batch, source)
            if bad is not None:
                num_rows = batch.num_rows + sum(rest.num_rows for rest in batches)
                yield BadRow(bad.reason, bad.detail, whole, 1, num_rows=max(1, num_rows))
                return
            yield from read_batch(batch, source, origin, number)
            number += batch.num_rows
    except (pa.ArrowException, OSError) as problem:
        if isinstance(problem, OSError) and problem.errno:
            raise
        yield BadRow("damaged file", f"cannot be read as arrow ({first_line(problem)}); what follows row {number} is lost", whole, 1)
        return
    if not number:
        yield BadRow("no rows", f"an arrow file without rows. Expected documents in the column `{columns_of(source)[0]}`", whole, 1)


def missing(batch: pa.RecordBatch, source: DocumentSource) -> BadValue | None:
    """What is wrong where a file has not the columns that the text is made of."""
    try:
        check_columns(batch.schema.names, source)
    except BadValue as bad:
        return bad
    return None


def batches_of(path: str) -> Iterator[pa.RecordBatch]:
    """The record batches of a file, or of a stream, which begins otherwise."""
    found = open_random(path)
    file = pa.memory_map(found) if isinstance(found, str) else found
    with file:
        is_stream = file.read(len(MAGIC)) != MAGIC
        file.seek(0)
        if is_stream:
            yield from pa.ipc.open_stream(file)
        else:
            reader = pa.ipc.open_file(file)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
