"""What every reader gives: a document, or a row that cannot be one, each with its place."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

IN_HUB_CACHE = re.compile(r"/datasets--(.+?)--(.+?)/snapshots/([0-9a-f]{40})/(.+)")
DocumentView = Mapping[str, str]
"""What filters and transforms see of a document: `text`, `source` (the source's name) and `where` (file and line)."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a source that can be read by itself: a range of a file's bytes, or all of it.

    A line, a row group of a parquet file or a batch of an arrow file belongs to the piece in which its first byte
    lies. So a file is cut by its size alone, and a piece may hold nothing.
    """

    path: str
    start: int
    stop: int | None
    """None: to the end."""
    number: int
    """Among the pieces of the source, in the order of the documents."""


class File(NamedTuple):
    """A file of a source as a listing shows it."""

    name: str
    size: int
    """In bytes."""
    version: str
    """Time of change, or what its server calls its content: the same, the same content."""


COUNTABLE_BYTES = 2**30  # of a file, whose lines are counted to tell where a row stands; that takes a second or less


@dataclass(frozen=True)
class Origin:
    """Where the rows of a piece come from; shared by all of them."""

    path: str
    unit: Literal["line", "row", "item", "document"]
    """What is counted. A file that is one document has nothing to count."""
    start: int = 0
    """Byte of the file at which the counting of lines begins; what is left of a line there counts as one."""

    def where(self, number: int) -> str:
        """`corpus/a.jsonl:17`, `a.parquet: row 17` or `a.txt`, counted from 1 over the whole file.

        Nobody fetches what stands before a piece of a remote file to count its lines: `s3://bucket/a.jsonl: line 17
        after byte 1,048,576`.
        """
        address = hub_address(self.path)
        if self.unit == "document":
            return address
        if self.unit != "line":
            return f"{address}: {self.unit} {number}"
        if "://" in self.path or self.start > COUNTABLE_BYTES:
            return self.near(number)
        return f"{address}:{lines_before(self.path, self.start) + number}"

    def near(self, number: int) -> str:
        """The same, without reading anything: lines are counted from where the piece begins."""
        if self.start and self.unit == "line":
            return f"{hub_address(self.path)}: line {number - 1} after byte {self.start + 1:,}"
        return f"{hub_address(self.path)}:{number}" if self.unit == "line" else self.where(number)


class Document(NamedTuple):
    """A text and where it stands.

    A plain tuple, because there are billions. `where` is worked out when it is asked for: in the middle of a large
    file that means counting the lines before. So ask for it of the documents that a message is about, not of each one.
    """

    text: str
    origin: Origin
    number: int
    score: float = math.nan
    """What it is ordered by, where the source names a column for that."""

    @property
    def where(self) -> str:
        """As an error would name it."""
        return self.origin.where(self.number)

    @property
    def near(self) -> str:
        """The same, without reading anything."""
        return self.origin.near(self.number)


@dataclass(frozen=True)
class BadRow:
    """A row that is no document."""

    reason: str
    """In a few words that many rows share, to count by: `not valid JSON`."""
    detail: str
    """What exactly is wrong with this one."""
    origin: Origin
    number: int
    byte: int | None = None
    """Where in the file (of a compressed one: in what is in it) the row begins or, where that is known, goes wrong."""
    raw: bytes | None = None
    """The row itself, where there is one."""
    num_rows: int = 1
    """How many rows are lost by it: more than one where a whole file or the rest of it is."""

    @property
    def where(self) -> str:
        """As an error would name it."""
        return self.origin.where(self.number)


class BadValue(Exception):  # noqa: N818 -- it is caught where it is raised, and becomes a BadRow
    """Why a row is none; readers turn it into a BadRow."""

    def __init__(self, reason: str, detail: str = "", byte: int | None = None) -> None:
        super().__init__(detail or reason)
        self.reason, self.detail, self.byte = reason, detail or reason, byte


def hub_address(path: str) -> str:
    """Where a file in the Hub's cache comes from, the same on each machine; other files as they are called."""
    found = IN_HUB_CACHE.search(path)
    return "hf://datasets/{}/{}@{}/{}".format(*found.groups()) if found else path


COUNTED: dict[str, tuple[int, int]] = {}  # file -> a byte and the lines before it: pieces mostly come in order


def lines_before(path: str, byte: int) -> int:
    """How many lines end before a byte of a file."""
    if not byte:
        return 0
    at, lines = COUNTED.get(path, (0, 0))
    if at > byte:
        at, lines = 0, 0
    with open(path, "rb") as file:
        file.seek(at)
        while at < byte and (block := file.read(min(1 << 22, byte - at))):
            lines += block.count(b"\n")
            at += len(block)
    COUNTED[path] = at, lines
    return lines
