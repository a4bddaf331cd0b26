"""Read txt, md, jsonl, json, csv, tsv, parquet and arrow; `READERS` in sources.py maps suffixes to readers."""

import csv
import json
import re
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cpt.data.readers.columns import check_columns, columns_of, text_columns
from cpt.data.readers.documents import (
    BadRow,
    BadValue,
    Document,
    Origin,
    Piece,
    decode,
    first_line,
    kind_of_value,
    row_as_json,
)
from cpt.data.readers.example import document_of, item_of
from cpt.data.readers.opening import (
    BOM,
    BUFFER,
    DAMAGE,
    REMOTE_BUFFER,
    is_url,
    open_file,
    open_random,
)
from cpt.recipe.paths import format_of
from cpt.recipe.schema import DocumentSource

LONGEST_LINE = 64 * 2**20
LONGEST_RECORD = 64 * 2**20  # an unclosed quote turns the rest of the file into one record
BATCH = 1000
QUOTED = re.compile(rb'"(?:[^"]|"")*"')
CUT = ": the file ends inside the row"
NO_MORE = "unexpected end of data"  # in errors of orjson and of csv
MAGIC = b"ARROW1"
# number from the origin; first byte; the line with its line end
Lines = Iterator[tuple[int, int, bytes]]
MESSAGE_KEYS = ("role", "content", "from", "value")
TOO_LONG = b"..."  # placeholder, compared by identity, for a document that is too long


def lines_of(piece: Piece) -> tuple[Origin, Lines]:
    """The lines whose first byte is in the piece, without a byte order mark."""
    # The end of a line, or the middle of one from the piece before.
    before = max(0, piece.start - 1)
    return Origin(piece.path, "line", before), read_lines(piece, before)


def read_lines(piece: Piece, first_byte: int) -> Lines:
    """Read the lines from a byte on; everything before the piece counts as one line."""
    stop = sys.maxsize if piece.stop is None else piece.stop
    number = 0
    end = first_byte
    with open_file(piece.path, first_byte, piece.stop) as file:
        if piece.start:
            end = pass_over(file, end, stop)
            number = 1
        while end < stop and (line := file.readline(LONGEST_LINE + 1)):
            begin = end
            end += len(line)
            number += 1
            if len(line) > LONGEST_LINE and not line.endswith(b"\n"):
                line = TOO_LONG
                end = pass_over(file, end, stop)
            elif not begin:
                line = line.removeprefix(BOM)
            yield number, begin, line


def pass_over(file: BinaryIO, at: int, stop: int) -> int:
    """The first byte after the current line; or one after `stop` if the line ends later, as no other begins before."""
    while at < stop and (part := file.readline(BUFFER)):
        at += len(part)
        if part.endswith(b"\n"):
            break
    return at


def refuse_long(raw: bytes) -> None:
    if raw is TOO_LONG:
        raise BadValue(
            "too long", f"longer than the limit of {LONGEST_LINE:,} bytes for one document"
        )


def read_text(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    """Read the documents of a text file byte by byte; lines lose only their line end."""
    if source.text_documents == "file":
        yield whole_text(piece.path, read_whole(piece.path))
        return
    for origin, number, byte, raw in raw_texts(piece, source.text_documents):
        try:
            refuse_long(raw)
            yield Document(decode(raw), origin, number)
        except BadValue as bad:
            yield bad.at(origin, number, byte, content_of(raw))


def content_of(raw: bytes) -> bytes | None:
    """The content of a bad row; None for a longer one, which was not read."""
    return None if raw is TOO_LONG else raw


def read_whole(path: str) -> bytes:
    """The content of a file; of one that is too long for a document, enough to see that."""
    with open_file(path) as file:
        raw = file.read(BUFFER)  # of a size that costs small files nothing
        return raw if len(raw) < BUFFER else raw + file.read(LONGEST_LINE + 1 - BUFFER)


def whole_text(path: str, raw: bytes) -> Document | BadRow:
    """The one document of a text file with this content."""
    origin = Origin(path, "document")
    try:
        refuse_long(raw if len(raw) <= LONGEST_LINE else TOO_LONG)
        return Document(decode(raw.removeprefix(BOM)), origin, 1)
    except BadValue as bad:
        is_lost = bad.reason == "too long"
        return replace(bad.at(origin, 1, 0), loses_file=is_lost, num_bytes=len(raw))


def raw_texts(piece: Piece, unit: str) -> Iterator[tuple[Origin, int, int, bytes]]:
    """Yield origin, number, first byte and content of each text; `unit` is `line` or the separator."""
    if unit == "line":
        origin, lines = lines_of(piece)
        for number, byte, line in lines:
            if not line.strip():
                continue
            if line is not TOO_LONG:
                line = line.rstrip(b"\r\n")
            yield origin, number, byte, line
        return
    with open_file(piece.path) as file:
        origin = Origin(piece.path, "item")
        for number, (byte, part) in enumerate(split(file, unit.encode()), start=1):
            if part.strip():
                yield origin, number, byte, part


def split(file: BinaryIO, separator: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the first byte and the content of each part, without a byte order mark; one part at a time in memory. A
    line break in the separator is any of LF and CRLF, also in one file."""
    pattern = re.escape(separator)
    line_end = b""
    if b"\r" not in separator:
        pattern = pattern.replace(b"\\\n", rb"\r?\n")
        if separator.startswith(b"\n"):  # a search that begins with something optional is slow
            pattern = pattern.removeprefix(rb"\r?")
            line_end = b"\r"
    longest_separator = len(separator) + separator.count(b"\n")
    buffer = b""  # the part so far, without the bytes of it that were discarded
    discarded = 0
    first_byte = 0  # of the part
    while block := file.read(BUFFER):
        buffer += block
        begin = 0
        for match in re.finditer(pattern, buffer):
            part = buffer[begin : match.start()].removesuffix(line_end)
            yield first_byte, part_of_text(part, first_byte, discarded)
            first_byte += discarded + match.end() - begin
            begin = match.end()
            discarded = 0
        buffer = buffer[begin:]
        searched = max(0, len(buffer) - longest_separator + 1)  # no separator begins before this
        if discarded + searched > LONGEST_LINE:
            discarded += searched
            buffer = buffer[searched:]
    yield first_byte, part_of_text(buffer, first_byte, discarded)


def part_of_text(part: bytes, first_byte: int, discarded: int) -> bytes:
    if discarded + len(part) > LONGEST_LINE:
        return TOO_LONG
    return part if first_byte else part.removeprefix(BOM)


def read_json_lines(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    origin, lines = lines_of(piece)
    column = source.text_column if source.template is None and source.chat is None else None
    key = orjson.dumps(column)
    for number, byte, line in lines:
        try:  # the fast path: most of billions of rows are good
            text = None if column is None else orjson.loads(line)[column]
        except (orjson.JSONDecodeError, KeyError, TypeError):
            text = None
        # orjson takes the last of repeated keys: then the key occurs twice before the text, which has at least as many
        # bytes as characters.
        if type(text) is str and "\0" not in text and line[: -len(text) - 1].count(key) < 2:
            yield Document(text, origin, number)
        elif line.strip():
            try:
                refuse_long(line)
                row = loads_strictly(line, source)
                if not isinstance(row, dict):
                    raise not_an_object(row, source)
                yield document_of(row, source, origin, number)
            except orjson.JSONDecodeError as problem:
                bad_row = why_not_json(line, problem).at(origin, number, byte, line)
                yield replace(bad_row, loses_file=CUT in bad_row.detail)
            except BadValue as bad:
                yield bad.at(origin, number, byte, content_of(line))


def loads(raw: bytes) -> Any:
    """The value of some JSON, also with NaN and Infinity, which Python writes."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as problem:
        if b"NaN" not in raw and b"Infinity" not in raw:
            raise
        try:
            return json.loads(raw)
        except ValueError:
            raise problem from None


class RepeatedKeys(dict[str, Any]):
    """An object whose JSON has keys twice. Reading one of them raises BadValue: which value is meant is unknown."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.times = Counter(key for key, _ in pairs)

    def __getitem__(self, key: str) -> Any:
        self.refuse(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.refuse(key)
        return super().get(key, default)

    def refuse(self, key: str) -> None:
        if self.times[key] > 1:
            raise BadValue(
                "repeated key", f"the key `{key}` occurs {self.times[key]} times in one object"
            )


def loads_strictly(raw: bytes, source: DocumentSource) -> Any:
    """The value of some JSON: a row, or a list of rows. RepeatedKeys for objects that repeat a key which is read."""
    value = loads(raw)
    row = value[0] if isinstance(value, list) and value else value
    if not isinstance(row, dict):
        return value
    names = text_columns(source) if source.chat is None else (*row, *MESSAGE_KEYS)
    nested = ".".join(names).split(".")
    for name in dict.fromkeys([*names, *nested]):
        occurrences = raw.count(b'"%b"' % name.encode())  # also as a text
        if occurrences > 1 and occurrences > num_keys(value, name):
            return json.loads(raw, object_pairs_hook=object_of)  # several times slower
    return value


def num_keys(value: object, name: str) -> int:
    """The number of objects with this key in a JSON value."""
    count = 0
    parts = [value]
    for part in parts:  # grows
        if isinstance(part, dict):
            if name in part:
                count += 1
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return count


def object_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    return row if len(row) == len(pairs) else RepeatedKeys(pairs)


def not_an_object(row: object, source: DocumentSource) -> BadValue:
    key = columns_of(source)[0]
    return BadValue(
        "not an object", f"{kind_of_value(row)}, expected a JSON object with the key `{key}`"
    )


def why_not_json(raw: bytes, problem: orjson.JSONDecodeError) -> BadValue:
    try:
        text = decode(raw)  # orjson does not report which byte is not UTF-8
    except BadValue as bad:
        return bad
    is_object = raw.lstrip()[:1] == b"{" and not raw.endswith(b"\n")
    is_cut = is_object and (problem.msg == NO_MORE or not raw.endswith((b"}", b"]")))
    detail = f"not valid JSON: {problem.msg} at character {problem.pos}"
    if is_cut:
        detail += CUT
    return BadValue("not valid JSON", detail, len(text[: problem.pos].encode()))


def read_json(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    origin = Origin(piece.path, "item")
    whole_file = Origin(piece.path, "document")
    with open_file(piece.path) as file:
        raw = file.read(BUFFER).removeprefix(BOM)
        are_lines = is_json_lines(raw)
        if not are_lines:
            raw += file.read()
    if are_lines:  # read in constant memory
        yield from read_json_lines(piece, source)
        return
    try:
        rows = loads_strictly(raw, source)
    except orjson.JSONDecodeError as problem:
        if is_json_lines(raw):  # of long lines
            yield from read_json_lines(piece, source)
        else:
            yield replace(why_not_json(raw, problem).at(whole_file, 1, 0), loses_file=True)
        return
    if not isinstance(rows, list):
        rows = [rows]
        origin = whole_file
    for number, row in enumerate(rows, start=1):
        if isinstance(row, dict):
            yield item_of(row, source, origin, number)
        else:
            yield not_an_object(row, source).at(origin, number, content=row_as_json(row))


def is_json_lines(raw: bytes) -> bool:
    first, _, rest = raw.lstrip().partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(loads(first), dict)
    except orjson.JSONDecodeError:
        return False


def has_quoting(path: str) -> bool:
    """Whether quotes in a tsv file enclose fields: each that begins a field ends it, or lines are parts of rows."""
    with open_file(path) as file:
        start = file.read(BUFFER)
    lines = start.splitlines()
    if len(start) == BUFFER:
        lines.pop()  # cut
    num_tabs = lines[0].count(b"\t") if lines else 0
    if any(line and line.count(b"\t") != num_tabs for line in lines):
        return True
    for line in lines:
        for field in line.split(b"\t"):
            if field[:1] == b'"' and not QUOTED.fullmatch(field):
                return False
    return True


class Records:
    """The records of a csv or tsv file, and the first byte of each. Quotes may contain line breaks, so a file is read
    from its beginning. A line with invalid UTF-8 makes only its record bad: it is read with the bytes replaced."""

    def __init__(self, piece: Piece) -> None:
        self.origin, self.lines = lines_of(piece)
        self.number = 1  # of the record's first line, and its first byte
        self.byte = 0
        self.num_lines = 0
        self.is_ended = True  # the last line that was read
        self.problem: BadValue | None = None
        self.raw: list[bytes] = []  # the lines of this record
        csv.field_size_limit(sys.maxsize)  # Python's default limit is 128 KiB per field
        self._dialect: dict[str, Any] = {"delimiter": ","}
        if format_of(piece.path) == ".tsv":
            quoting = csv.QUOTE_MINIMAL if has_quoting(piece.path) else csv.QUOTE_NONE
            self._dialect = {"delimiter": "\t", "quoting": quoting}
        self._reader: Iterator[list[str]] | None = None

    def _text(self) -> Iterator[str]:
        for number, byte, line in self.lines:
            if not self.num_lines:
                self.number = number
                self.byte = byte
            self.num_lines += 1
            self.raw.append(line)
            self.is_ended = line.endswith((b"\n", b"\r"))
            if byte + len(line) - self.byte > LONGEST_RECORD:
                raise BadValue(
                    "not valid CSV",
                    f"not valid CSV (a record of more than {LONGEST_RECORD:,} bytes; check for an unclosed quote)",
                )
            try:
                refuse_long(line)
                yield decode(line)
            except BadValue as bad:
                if self.problem is None:
                    self.problem = BadValue(bad.reason, bad.detail, byte + (bad.byte or 0))
                if bad.byte is None:  # too long
                    yield "\n"
                else:
                    yield line.replace(b"\0", b"?").decode(errors="replace")

    def next(self) -> list[str] | None:
        self.num_lines = 0
        self.problem = None
        self.raw = []
        if self._reader is None:
            self._reader = csv.reader(self._text(), strict=True, **self._dialect)
        try:
            record = next(self._reader, None)
        except BadValue:
            self._reader = None  # the next record begins after this line
            raise
        except csv.Error as problem:
            raise BadValue("not valid CSV", f"not valid CSV ({problem})", self.byte) from problem
        if self.problem is not None:
            raise self.problem
        return record

    def bad(self, bad: BadValue) -> BadRow:
        byte = self.byte if bad.byte is None else bad.byte
        # An unclosed quote swallows lines, and each of them counts.
        num_rows = max(1, self.num_lines) if bad.reason == "not valid CSV" else 1
        return BadRow(
            reason=bad.reason,
            detail=bad.detail,
            origin=self.origin,
            number=self.number,
            byte=byte,
            num_rows=num_rows,
            loses_file=NO_MORE in bad.detail or CUT in bad.detail,  # the former inside quotes
            content=None if TOO_LONG in self.raw else b"".join(self.raw),
        )


def read_delimited(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    records = Records(piece)
    try:
        columns = records.next() or []
        check_columns(columns, source)
    except BadValue as bad:
        num_lost = max(1, sum(1 for _ in records.lines))  # all following lines
        yield replace(records.bad(bad), num_rows=num_lost, loses_file=True)
        return
    index_of = {column: columns.index(column) for column in columns_of(source, columns)}
    while True:
        try:
            record = records.next()
            if record is None:
                return
            if not record:  # a blank line
                continue
            if len(record) != len(columns):
                detail = f"{len(record)} fields, expected {len(columns)}: {', '.join(columns)}"
                if len(record) < len(columns) and not records.is_ended:
                    detail += CUT
                raise BadValue("wrong number of fields", detail)
            row = {column: record[index] for column, index in index_of.items()}
            yield document_of(row, source, records.origin, records.number)
        except BadValue as bad:
            yield records.bad(bad)


def read_batch(
    batch: pa.RecordBatch, source: DocumentSource, origin: Origin, rows_before: int
) -> Iterator[Document | BadRow]:
    names = columns_of(source, batch.schema.names)
    is_utf8 = True
    try:
        columns: list[list[object]] = [batch.column(name).to_pylist() for name in names]
    except UnicodeDecodeError:  # arrow does not validate UTF-8 earlier
        is_utf8 = False
        columns = [list(map(as_python, batch.column(name))) for name in names]
    if source.chat is not None:
        columns = [list(map(without_nulls, column)) for column in columns]
    for number, values in enumerate(zip(*columns, strict=True), start=rows_before + 1):
        bad = None if is_utf8 else first_bad(values)
        if bad is None:
            yield item_of(dict(zip(names, values, strict=True)), source, origin, number)
        else:
            yield bad.at(origin, number)


def first_bad(values: Sequence[object]) -> BadValue | None:
    for value in values:
        if isinstance(value, BadValue):
            return value
    return None


def without_nulls(value: object) -> object:
    """Remove the null keys that a table adds to objects because other objects have them."""
    if isinstance(value, list):
        return list(map(without_nulls, value))
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return value


def as_python(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except UnicodeDecodeError as problem:
        detail = f"invalid UTF-8 at byte {problem.start} of the text"
        return BadValue("invalid UTF-8", detail, content=problem.object)


def read_parquet(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    origin = Origin(piece.path, "row")
    whole_file = Origin(piece.path, "document")
    num_rows = 0
    num_read = 0
    try:
        # Read batches: a row group may be the whole file.
        buffer = REMOTE_BUFFER if is_url(piece.path) else BUFFER
        with pq.ParquetFile(open_random(piece.path), pre_buffer=False, buffer_size=buffer) as file:
            groups = groups_of(piece, file.metadata)
            sizes = []
            for group in range(file.num_row_groups):
                sizes.append(file.metadata.row_group(group).num_rows)
            rows_before = sum(sizes[: groups.start])
            num_rows = sum(sizes[groups.start : groups.stop])
            if not num_rows:
                return
            check_columns(file.schema_arrow.names, source)
            columns = list(columns_of(source, file.schema_arrow.names))
            for batch in file.iter_batches(BATCH, row_groups=list(groups), columns=columns):
                yield from read_batch(batch, source, origin, rows_before + num_read)
                num_read += batch.num_rows
    except BadValue as bad:
        yield replace(bad.at(whole_file, 1), num_rows=max(1, num_rows), loses_file=True)
    except DAMAGE as problem:
        if not is_damage(problem, piece.path):
            raise
        num_lost = num_rows - num_read
        detail = f"cannot be read as parquet ({first_line(problem)}); {num_lost:,} rows are lost"
        yield BadRow(
            "damaged file", detail, whole_file, 1, num_rows=max(1, num_lost), loses_file=True
        )


def is_damage(problem: Exception, path: str) -> bool:
    """True if the file's content is damaged, False if the file cannot be reached."""
    if isinstance(problem, OSError) and not isinstance(problem, pa.ArrowException):
        return not (problem.errno or is_url(path))
    return isinstance(problem, DAMAGE)


def groups_of(piece: Piece, metadata: pq.FileMetaData) -> range:
    """The row groups whose first byte is in the piece."""
    begins: list[int] = []
    begin = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if group.num_columns:
            column = group.column(0)
            first_byte = min(
                column.data_page_offset, column.dictionary_page_offset or column.data_page_offset
            )
            begin = max(begin, first_byte)  # in row order, wherever the writer put them
        begins.append(begin)
    stop = sys.maxsize if piece.stop is None else piece.stop
    return range(bisect_left(begins, piece.start), bisect_left(begins, stop))


def read_arrow(piece: Piece, source: DocumentSource) -> Iterator[Document | BadRow]:
    origin = Origin(piece.path, "row")
    num_read = 0
    try:
        for batch in batches_of(piece.path):
            check_columns(batch.schema.names, source)
            yield from read_batch(batch, source, origin, num_read)
            num_read += batch.num_rows
    except BadValue as bad:
        num_lost = sum(batch.num_rows for batch in batches_of(piece.path))
        at_document = bad.at(Origin(piece.path, "document"), 1)
        yield replace(at_document, num_rows=max(1, num_lost), loses_file=True)


def batches_of(path: str) -> Iterator[pa.RecordBatch]:
    """All batches of a file or a stream; a local file is memory-mapped, not copied."""
    opened = open_random(path)
    if isinstance(opened, str):
        opened = pa.memory_map(opened)
    with opened as file:
        is_file = file.read(len(MAGIC)) == MAGIC
        file.seek(0)
        if not is_file:
            yield from pa.ipc.open_stream(file)
            return
        reader = pa.ipc.open_file(file)
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
