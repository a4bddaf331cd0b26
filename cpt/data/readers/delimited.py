"""csv and tsv: the first line names the columns; every further record is a document."""

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace

from cpt.data.documents import BadRow, BadValue, Document, Origin, Piece
from cpt.data.readers.lines import KEPT_OF_LONG_LINE, lines_of, refuse_long
from cpt.data.readers.opening import format_of
from cpt.data.readers.values import check_columns, columns_of, decode, document_of
from cpt.recipe.schema import DocumentSource

LONGEST_RECORD = 64 * 2**20  # a quote that is never closed makes one of the rest of the file


class Records:
    """The records of a file, and the lines that each was made of.

    Quotes may hold line breaks, so a file can be read only from its beginning. A line that is not UTF-8 spoils its
    record and no other: it is read with its bad bytes marked.
    """

    def __init__(self, piece: Piece) -> None:
        self.origin, self._lines = lines_of(piece)
        self.number, self.byte = 1, 0
        self.raw: list[bytes] = []
        self._size = 0
        self.problem: BadValue | None = None
        csv.field_size_limit(sys.maxsize)  # Python's own limit is 128 KiB a field
        self._delimiter = "\t" if format_of(piece.path) == ".tsv" else ","
        self._reader = self._read_on()

    def _read_on(self) -> Iterator[list[str]]:
        return csv.reader(self._text(), delimiter=self._delimiter, strict=True)

    def _text(self) -> Iterator[str]:
        for number, byte, line in self._lines:
            if not self.raw:
                self.number, self.byte = number, byte
            self.raw.append(line)
            self._size += len(line)
            if self._size > LONGEST_RECORD:
                self.raw = [b"".join(self.raw)[:KEPT_OF_LONG_LINE] + b"...", *[b""] * (len(self.raw) - 1)]
                raise BadValue(
                    "not valid CSV",
                    f"not valid CSV (a record of more than {LONGEST_RECORD:,} bytes; is a quote never closed?)",
                )
            try:
                refuse_long(line)
                yield decode(line)
            except BadValue as bad:
                self.problem = self.problem or BadValue(bad.reason, bad.detail, byte + (bad.byte or 0))
                yield "\n" if bad.byte is None else line.replace(b"\0", b"?").decode(errors="replace")

    def next(self) -> list[str] | None:
        """The next record, None at the end.

        Raises:
            BadValue: it is none.
        """
        self.raw, self.problem, self._size = [], None, 0
        try:
            record = next(self._reader, None)
        except BadValue:
            self._reader = self._read_on()
            raise
        except csv.Error as problem:
            raise BadValue("not valid CSV", f"not valid CSV ({problem})", self.byte) from problem
        if self.problem is not None:
            raise self.problem
        return record

    def bad(self, bad: BadValue) -> BadRow:
        """The record as a bad row; a quote that is never closed swallows lines, and each of them counts."""
        byte = self.byte if bad.byte is None else bad.byte
        num_rows = max(1, len(self.raw)) if bad.reason == "not valid CSV" else 1
        return BadRow(bad.reason, bad.detail, self.origin, self.number, byte, b"".join(self.raw), num_rows)

    def bad_file(self, bad: BadValue) -> BadRow:
        """The header as a bad row that costs all lines after it."""
        return replace(self.bad(bad), num_rows=max(1, sum(1 for _ in self._lines)))


def read_delimited(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """The records of a file."""
    records = Records(piece)
    try:
        columns = records.next() or []
        check_columns(columns, source)
    except BadValue as bad:
        yield records.bad_file(bad)
        return
    places = [columns.index(column) for column in columns_of(source, columns)]
    is_empty = True
    while True:
        try:
            record = records.next()
            if record is None:
                break
            if not record:  # a blank line
                continue
            is_empty = False
            if len(record) != len(columns):
                what = f"{len(record)} fields, expected {len(columns)}: {', '.join(columns)}"
                raise BadValue("wrong number of fields", what)
            yield document_of(
                {columns[place]: record[place] for place in places}, source, records.origin, records.number
            )
        except BadValue as bad:
            is_empty = False
            yield records.bad(bad)
    if is_empty:
        detail = f"a header and no rows. Expected documents in the column `{columns_of(source)[0]}`"
        yield BadRow("no rows", detail, Origin(piece.path, "document"), 1)
