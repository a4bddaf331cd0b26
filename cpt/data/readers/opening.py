"""Open a file wherever it lies, local or behind a URL, plain or compressed."""

import io
from pathlib import Path
from posixpath import splitext
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa

from cpt.data.documents import Piece
from cpt.data.readers.remote import RemoteFile

BOM = b"\xef\xbb\xbf"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
BUFFER = 1 << 20
SMALL_BUFFER = 1 << 16  # what stands before the damage of a compressed file is read, all but the last buffer
REMOTE_BUFFER = (
    1 << 23
)  # what is asked of a server at once: an answer of the Hub takes a good part of a second to begin


def is_url(path: str) -> bool:
    """True for s3://, gs://, https://, memory:// and all else that fsspec opens."""
    return "://" in path


def format_of(path: str) -> str:
    """The suffix that tells the format: `.jsonl` of `a.jsonl.gz`."""
    stem, suffix = splitext(path.lower())
    return splitext(stem)[1] if suffix in COMPRESSED else suffix


def compression_of(path: str) -> str | None:
    """`gzip`, `zstd` or None."""
    return COMPRESSED.get(splitext(path.lower())[1])


def open_file(path: str, begin: int = 0, stop: int | None = None) -> BinaryIO:
    """The file's content, decompressed, from a byte on.

    Args:
        stop: where the reader will probably end; a server is asked for little more.
    """
    if compression_of(path) is None:
        return open_plain(path, begin, stop)
    stream: Any = pa.CompressedInputStream(pa.PythonFile(open_plain(path), mode="r"), compression_of(path))
    return cast(BinaryIO, io.BufferedReader(stream, SMALL_BUFFER))


def open_plain(path: str, begin: int = 0, stop: int | None = None) -> BinaryIO:
    """The file as it lies there."""
    if is_url(path):
        return io.BufferedReader(RemoteFile(path, begin, stop), REMOTE_BUFFER)
    file = Path(path).open("rb", buffering=BUFFER)  # noqa: SIM115
    file.seek(begin)
    return file


def open_random(path: str) -> Any:
    """What pyarrow reads tables from: the file, or all of it in memory where it is compressed."""
    if compression_of(path) is None:
        return io.BufferedReader(RemoteFile(path), SMALL_BUFFER) if is_url(path) else path
    with open_file(path) as file:
        return pa.BufferReader(file.read())


def size_of(path: str) -> int:
    """Bytes of the file as it lies there."""
    if not is_url(path):
        return Path(path).stat().st_size
    system, name = fsspec.core.url_to_fs(path)
    return int(system.size(name) or 0)


def is_whole(piece: Piece) -> bool:
    """True for a piece that is all of its file."""
    return piece.start == 0 and piece.stop is None
