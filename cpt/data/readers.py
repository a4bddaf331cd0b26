"""Read the documents of one local file, format by format; a bad row is an error that names file and line."""

import csv
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from cpt.errors import DataError

BOM = b"\xef\xbb\xbf"
Rows = Iterator[tuple[str, str]]  # where a document stands, `corpus/a.jsonl:17`, and its text
Reader = Callable[[Path, str, str], Rows]  # of (file, column, the source's key in the recipe)


def read_document(path: Path, column: str, key: str) -> Rows:
    """The whole file is one document."""
    yield str(path), decode(path.read_bytes().removeprefix(BOM), str(path), key)


def read_jsonl(path: Path, column: str, key: str) -> Rows:
    """One JSON object a line; blank lines, CRLF and a byte order mark are fine."""
    found = False
    with path.open("rb") as file:
        for where, line in lines(path, file):
            if not line.strip():
                continue
            found = True
            yield where, text_of(parse_json(line, where, column, key), column, where, key)
    if not found:
        raise DataError(f"{path}: no rows, only blank lines. Expected one JSON object a line with the key `{column}` ({key}.path).")


def read_parquet(path: Path, column: str, key: str) -> Rows:
    """One row, one document; only the text column is read."""
    try:
        with pq.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, column, str(path), key)
            if not file.metadata.num_rows:
                raise DataError(f"{path}: a parquet file without rows. Expected documents in the column `{column}` ({key}.path).")
            number = 0
            for batch in file.iter_batches(batch_size=1000, columns=[column]):
                for value in batch.column(0):
                    number += 1
                    where = f"{path}: row {number}"
                    yield where, text_of({column: as_python(value, where, key)}, column, where, key)
    except (pa.ArrowException, OSError) as problem:
        raise DataError(
            f"{path}: cannot be read as parquet ({first_line(problem)}). Write the file anew, or leave it out of `{key}.path`."
        ) from problem


def read_csv(path: Path, column: str, key: str) -> Rows:
    """The first line names the columns; every further record is a document."""
    csv.field_size_limit(sys.maxsize)  # Python's own limit is 128 KiB a field
    with path.open("rb") as file:
        records = csv.reader(
            (decode(line, where, key) for where, line in lines(path, file)),
            delimiter="\t" if path.suffix.lower() == ".tsv" else ",",
            strict=True,
        )
        try:
            columns = next(records, [])
            check_columns(columns, column, f"{path}:1", key)
            place, found = columns.index(column), False
            for record in filter(None, records):
                found = True
                where = f"{path}:{records.line_num}"
                if len(record) != len(columns):
                    raise DataError(
                        f"{where}: {len(record)} fields, expected {len(columns)}: {', '.join(columns)}. Fix the line ({key}.path)."
                    )
                yield where, record[place]
        except csv.Error as problem:
            raise DataError(f"{path}:{records.line_num}: not valid CSV ({problem}). Fix the line ({key}.path).") from problem
    if not found:
        raise DataError(f"{path}: a header and no rows. Expected documents in the column `{column}` ({key}.path).")


READERS: dict[str, Reader] = {
    ".txt": read_document,
    ".md": read_document,
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".tsv": read_csv,
}


def lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Where a line stands, and its bytes without a byte order mark."""
    for number, line in enumerate(file, start=1):
        yield f"{path}:{number}", line.removeprefix(BOM) if number == 1 else line


def decode(raw: bytes, where: str, key: str) -> str:
    """UTF-8 text of a text file."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        what = f"invalid UTF-8 at byte {problem.start} (0x{raw[problem.start]:02x})"
        raise DataError(f"{where}: {what}. Save the file as UTF-8, or fix the place ({key}.path).") from problem
    if "\0" in text:
        raise DataError(f"{where}: a NUL byte at byte {raw.index(0)}: this is no text. Fix it, or leave the file out of `{key}.path`.")
    return text


def parse_json(line: bytes, where: str, column: str, key: str) -> dict[str, Any]:
    """The object that stands in a line."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as problem:
        decode(line, where, key)  # orjson does not tell which byte is not UTF-8
        what = "a lone surrogate (half of a character)" if "surrogate" in problem.msg else problem.msg
        raise DataError(f"{where}: not valid JSON: {what}, at character {problem.pos}. Fix or remove the line ({key}.path).") from problem
    if not isinstance(row, dict):
        raise DataError(f"{where}: {kind(row)}, expected a JSON object with the key `{column}`. Fix or remove the line ({key}.path).")
    return row


def text_of(row: dict[str, Any], column: str, where: str, key: str) -> str:
    """The document's text, which must be there and be a string."""
    check_columns(list(row), column, where, key)
    text = row[column]
    if not isinstance(text, str):
        raise DataError(
            f"{where}: `{column}` is {kind(text)}, expected a string. Fix or remove the row, or set another `{key}.text_column`."
        )
    return text


def check_columns(found: list[str], column: str, where: str, key: str) -> None:
    """Refuse a row or a file without the text column."""
    if column not in found:
        raise DataError(f"{where}: no column `{column}`. It has: {', '.join(map(str, found)) or 'none'}. Set `{key}.text_column`.")


def as_python(value: pa.Scalar, where: str, key: str) -> object:
    """Arrow does not check UTF-8 before this."""
    try:
        return value.as_py()
    except UnicodeDecodeError as problem:
        raise DataError(f"{where}: invalid UTF-8 at byte {problem.start}. Fix or remove the row ({key}.path).") from problem


def kind(value: object) -> str:
    """What a value is, in JSON's words."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object", str: "a string"}
    return names.get(type(value), f"of type {type(value).__name__}")


def first_line(problem: BaseException) -> str:
    """The first line of an error's message."""
    return (str(problem).splitlines() or [type(problem).__name__])[0]
