"""Open a file wherever it lies, local or behind a URL, plain or compressed."""

import io
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

import fsspec
import pyarrow as pa

from cpt.data.documents import Piece

BOM = b"\xef\xbb\xbf"
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
BUFFER = 1 << 20
SMALL_BUFFER = 1 << 16  # what stands before the damage of a compressed file is read, all but the last buffer


def is_url(path: str) -> bool:
    """True for s3://, gs://, https://, memory:// and all else that fsspec opens."""
    return "://" in path


def format_of(path: str) -> str:
    """The suffix that tells the format: `.jsonl` of `a.jsonl.gz`."""
    name = PurePosixPath(path.lower())
    return PurePosixPath(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def compression_of(path: str) -> str | None:
    """`gzip`, `zstd` or None."""
    return COMPRESSED.get(PurePosixPath(path.lower()).suffix)


def open_file(path: str) -> BinaryIO:
    """The file's content, decompressed, from its beginning."""
    compression = compression_of(path)
    plain = fsspec.open(path, "rb").open() if is_url(path) else Path(path).open("rb", buffering=BUFFER)  # noqa: SIM115
    if compression is None:
        return cast(BinaryIO, plain)
    stream: Any = pa.CompressedInputStream(pa.PythonFile(plain, mode="r"), compression)
    return cast(BinaryIO, io.BufferedReader(stream, SMALL_BUFFER))


def open_random(path: str) -> Any:
    """What pyarrow reads tables from: the file, or all of it in memory where it is compressed."""
    if compression_of(path) is None:
        return fsspec.open(path, "rb").open() if is_url(path) else path
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
