"""arrow: IPC files and streams, also those that `datasets` saves; a local one can be read in parts."""

import io
import sys
from collections.abc import Iterator

import pyarrow as pa

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.opening import open_random
from cpt.data.readers.tables import read_batch
from cpt.data.readers.values import check_columns, columns_of, first_line
from cpt.recipe.schema import DocumentSource

MAGIC = b"ARROW1"
Batches = Iterator[tuple[int, int, pa.RecordBatch]]  # where it begins; rows of the file before it; the batch


def read_arrow(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The rows of a piece's batches."""
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
