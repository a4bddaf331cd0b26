"""The items that a reader yields, documents and bad rows, and the handling of bad rows."""

import json
import re
from base64 import b64encode
from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cpt.errors import DataError

IN_HUB_CACHE = re.compile(r"/datasets--(.+?)--(.+?)/snapshots/([0-9a-f]{40})/(.+)")
DocumentView = Mapping[str, str]
"""A document as filters and transforms see it: `text`, `source` (its name) and `where` (file and line)."""


class Piece(NamedTuple):
    """A range of a file's bytes, or the whole file. A line, or a row group of a parquet file, belongs to the piece
    with its first byte, so the file's size alone decides the cuts, and a piece may be empty."""

    path: str
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.stop is None


class File(NamedTuple):
    name: str
    size: int
    version: str  # modification time or ETag: equal versions, equal content


# largest file whose lines are counted to locate a row; takes at most a second
COUNTABLE_BYTES = 2**30
# file -> (byte, lines before it), as pieces are mostly read in order
COUNTED: dict[str, tuple[int, int]] = {}


@dataclass(frozen=True)
class Origin:
    path: str
    unit: Literal["line", "row", "item", "document"]
    start: int = 0  # byte where line counting starts; a partial line there counts as one

    def where(self, number: int, *, exact: bool = True) -> str:
        """`corpus/a.jsonl:17`, `a.parquet: row 17` or `a.txt`, counted from 1 over the whole file. If not `exact`, or
        for remote and huge files, lines are not counted: `a.jsonl: line 17 after byte 1,048,576`."""
        address = hub_address(self.path)
        if self.unit == "document":
            return address
        if self.unit != "line":
            return f"{address}: {self.unit} {number}"
        if not self.start:
            return f"{address}:{number}"
        if not exact or "://" in self.path or self.start > COUNTABLE_BYTES:
            return f"{address}: line {number - 1} after byte {self.start + 1:,}"
        return f"{address}:{self.lines_before() + number}"

    def lines_before(self) -> int:
        """The lines of the file that end before `start`."""
        byte, lines = COUNTED.get(self.path, (0, 0))
        if byte > self.start:
            byte = lines = 0
        if byte < self.start:
            with open(self.path, "rb") as file:
                file.seek(byte)
                while block := file.read(min(1 << 22, self.start - byte)):
                    lines += block.count(b"\n")
                    byte += len(block)
            COUNTED[self.path] = byte, lines
        return lines


class Document(NamedTuple):
    """A text and its place. A plain tuple, because there are billions. `where` may count the lines of a large file:
    use it in messages, not for each document."""

    text: str
    origin: Origin
    number: int

    @property
    def where(self) -> str:
        return self.origin.where(self.number)


@dataclass(frozen=True)
class BadRow:
    reason: str  # short and shared by many rows, to group by: `not valid JSON`
    detail: str
    origin: Origin
    number: int
    byte: int | None = None  # in the decompressed file: start of the row or, if known, of the error
    num_rows: int = 1  # lost rows; above 1 for a file, or the rest of one
    num_bytes: int = 0  # of the row in its file; 0 if unknown
    loses_file: bool = False  # the file, or the rest of it: always an error in a run
    content: bytes | None = None  # of the row in its file, or its columns as JSON; None if unknown

    @property
    def where(self) -> str:
        return self.origin.where(self.number)


class BadValue(Exception):  # noqa: N818 -- always caught and turned into a BadRow
    """Why a row is bad; readers turn it into a BadRow."""

    def __init__(
        self, reason: str, detail: str = "", byte: int | None = None, content: bytes | None = None
    ) -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail or reason
        self.byte = byte
        self.content = content

    def at(
        self, origin: Origin, number: int, byte: int | None = None, content: bytes | None = None
    ) -> BadRow:
        """The bad row that begins at `byte`, or at this error's own byte, which may be later in the row."""
        return BadRow(
            reason=self.reason,
            detail=self.detail,
            origin=origin,
            number=number,
            byte=None if byte is None else byte + (self.byte or 0),
            num_bytes=0 if byte is None or content is None else len(content),
            content=self.content if content is None else content,
        )


def hub_address(path: str) -> str:
    """The Hub address of a file in the Hub's cache, equal on all machines; other paths are unchanged."""
    cached = IN_HUB_CACHE.search(path)
    if cached is None:
        return path
    owner, name, revision, file = cached.groups()
    return f"hf://datasets/{owner}/{name}@{revision}/{file}"


OnBadRow = Literal["error", "skip"]
Listed = dict[str, Any]  # a bad row as a line of bad_rows.jsonl
FILE_NAME = "bad_rows.jsonl"
LONGEST_CONTENT = 64 * 2**10  # bytes of a row in that file
SHOWN = 5
ABSURD_SHARE = 0.2  # of a source's tokens in one document
REMEDY = "Fix or remove it, or set `data.on_bad_row: skip` ({key}.path)."
OTHER_COLUMNS = "Fix or remove the row, or set other columns: `{key}.text_column`, `{key}.chat`."
CONVERT = f"Convert it (iconv -f ENCODING -t utf-8). {REMEDY}"
REMEDIES = {
    "missing column": "Set `{key}.text_column`.",
    "missing columns": "Write it in `{key}`.",
    **dict.fromkeys(
        ("null", "wrong type", "texts and messages", "no value", "wrong value", "not a chat"),
        OTHER_COLUMNS,
    ),
    **dict.fromkeys(("invalid UTF-8", "UTF-16"), CONVERT),
    "too long": "Split it. For a txt file, set `{key}.text_documents` to `line` or to a separator.",
    **dict.fromkeys(("columns of one name", "repeated key"), "Rename all but one."),
    "long window": "Unpack it: zstd -d --long=31 FILE.",
    "damaged file": "Download or copy it again, or set `{key}.path` to a glob of the other files.",
    "pointer of Git LFS": "Fetch the files: git lfs pull. Or download them: hf download NAME --repo-type dataset.",
    "wrong suffix": "Rename it, and unpack a .zip; a .pdf is converted by: cpt data ingest.",
    "page of HTML": "Download it again: servers answer with a page instead of a file if a sign-in is missing. Convert"
    " real pages: cpt data ingest.",
}


def documents_of(
    items: Iterable[Document | BadRow], key: str, skip: Callable[[BadRow], None] | None = None
) -> Iterator[Document]:
    """Yield the documents. Bad rows are passed to `skip`; without it the first one raises a DataError."""
    for item in items:
        if isinstance(item, Document):
            yield item
        elif skip is None:
            raise DataError(complaint(item, key))
        else:
            skip(item)


def complaint(bad: BadRow, key: str) -> str:
    at = "" if bad.byte is None else f" Byte {bad.byte:,} of the file."
    return (
        f"{bad.where}: {bad.detail}.{at} {remedy_for(bad.reason, key, loses_file=bad.loses_file)}"
    )


def remedy_for(reason: str, key: str, *, loses_file: bool) -> str:
    usual = REMEDIES["damaged file"] if loses_file else REMEDY  # a lost file cannot be skipped
    return REMEDIES.get(reason, usual).format(key=key)


def row_as_json(row: object) -> bytes:
    """A row of a table, an array or a function as one line of JSON."""
    plain = dict(row) if isinstance(row, Mapping) else row
    text = json.dumps(plain, ensure_ascii=False, skipkeys=True, default=str)
    return text.encode(errors="backslashreplace")  # a lone surrogate becomes an escape of JSON


def content_fields(content: bytes | None) -> Listed:
    """What can be mended of a bad row: `content`, or `content_base64` if it is not UTF-8."""
    if content is None:
        return {}
    beginning = content[:LONGEST_CONTENT]
    is_cut = len(beginning) < len(content)
    fields: Listed = {"content_is_cut": True} if is_cut else {}
    try:  # a character that is cut at the end is dropped
        text = getincrementaldecoder("utf-8")().decode(beginning, final=not is_cut)
    except UnicodeDecodeError:
        return {"content_base64": b64encode(beginning).decode("ascii"), **fields}
    return {"content": text.rstrip("\r\n"), **fields}


def listed(bad: BadRow) -> Listed:
    return {
        "where": bad.where,
        "byte": bad.byte,
        "reason": bad.reason,
        "detail": bad.detail,
        "rows": bad.num_rows,
        "lost_file": bad.loses_file,
        **content_fields(bad.content),
    }


def refuse_too_many(
    num_bad: int, num_good: int, max_share: float, path: str, key: str, listed: Iterable[Listed]
) -> None:
    share = num_bad / max(1, num_bad + num_good)
    if share > max_share:
        first = "; ".join(f"{row['where']}: {row['detail']}" for row in islice(listed, SHOWN))
        raise DataError(
            f"{path}: {num_bad:,} of {num_bad + num_good:,} rows are bad ({share:.2%}), more than `data.max_bad_share`"
            f" ({max_share:.2%}). First rows: {first}. List all: cpt data check. Fix `{key}.path`, or raise the share."
        )


def count_reasons(bad_rows: Iterable[Listed]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for row in bad_rows:
        counts[row["reason"]] += row["rows"]
    return dict(counts)


def write_bad_rows(bad_rows: Sequence[Listed], folder: Path) -> None:
    (folder / FILE_NAME).unlink(missing_ok=True)
    if bad_rows:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in bad_rows)
        (folder / FILE_NAME).write_text(lines, encoding="utf-8")


def absurd_share(
    name: str, where: str, size: int, total: int, num_documents: int, unit: str = "tokens"
) -> str | None:
    """A warning if one document is an absurdly large part of a source with more than a few; sizes are in `unit`."""
    if num_documents < 2 / ABSURD_SHARE or size <= ABSURD_SHARE * total:
        return None
    at = f" ({where})" if where else ""
    return (
        f"{name}: one of {num_documents:,} documents{at} makes up {size / total:.0%} of the {unit}. Is it one"
        " document? The filter `length` with `max_characters` drops such documents"
    )


def clean(text: object, column: str) -> str:
    if not isinstance(text, str):
        reason = "null" if text is None else "wrong type"
        raise BadValue(reason, f"`{column}` is {kind_of_value(text)}, expected a string")
    if "\0" in text:
        raise BadValue(
            "NUL byte", f"a NUL byte at character {text.index(chr(0))} of `{column}`: not a text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as problem:  # only Python functions can produce half a character
        raise BadValue(
            "lone surrogate",
            f"a lone surrogate (half of a character) at character {problem.start} of `{column}`",
        ) from problem
    return text


def decode(raw: bytes) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        if raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
            raise BadValue("UTF-16", "UTF-16, expected UTF-8", 0) from problem
        detail = f"invalid UTF-8 at byte {problem.start} (0x{raw[problem.start]:02x})"
        raise BadValue("invalid UTF-8", detail, problem.start) from problem
    if "\0" in text:
        raise BadValue("NUL byte", f"a NUL byte at byte {raw.index(0)}: not a text", raw.index(0))
    return text


def kind_of_value(value: object) -> str:
    names = {
        bool: "a boolean",
        int: "a number",
        float: "a number",
        list: "a list",
        dict: "an object",
        str: "a string",
    }
    return "null" if value is None else names.get(type(value), f"of type {type(value).__name__}")


def first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]
