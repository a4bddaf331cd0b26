"""Open a file, local or behind a URL, plain or compressed."""

import gzip
import io
import re
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar, cast

import fsspec
import pyarrow as pa

from cpt.recipe.paths import COMPRESSED_FILES, DOCUMENT_FILES, without_query

BOM = b"\xef\xbb\xbf"
KNOWN = f"{', '.join(sorted(DOCUMENT_FILES))}, or one of these with {' or '.join(COMPRESSED_FILES)}"
BUFFER = 1 << 20
SMALL_BUFFER = 1 << 16  # at most this much before the damage in a compressed file is lost
REMOTE_BUFFER = 1 << 23  # bytes per request: the Hub takes most of a second to respond
PAST_STOP = 1 << 16  # bytes per request for a line that ends after its piece
FIRST_BYTES = 512
POINTERS = (b"version https://git-lfs.github.com/spec/", b"/annex/objects/")
MAGIC_BYTES = {
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
    b"%PDF-": ".pdf",
    b"PAR1": ".parquet",
}
COMPRESSED_BYTES = tuple(MAGIC_BYTES)[:2]
PAGE = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?(?:<!--.*?-->\s*)*<(?:!doctype\s+html|html[\s>])",
    re.IGNORECASE | re.DOTALL,
)
# The field of a URL with its signature -> the fields that are renewed with it: S3, Google Cloud, CloudFront, Azure.
SIGNING = {
    "x-amz-signature": r"x-amz-.*",
    "x-goog-signature": r"x-goog-.*",
    "signature": r"signature|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid",
    "sig": r"s(e|i|p|r|s|t|v|ig|ip|pr|rt|ke|ks|kt|kv|koid|ktid)",
}
TRIES = 5
FIRST_WAIT_SECONDS = 0.5  # doubled after each try
TRY_AGAIN = (408, 425, 429)  # and every status >= 500
DAMAGE = (OSError, EOFError, zlib.error, pa.ArrowException)  # raised by files that are not intact
Result = TypeVar("Result")


class RemoteFile(io.RawIOBase):
    """Read through fsspec, in requests of the buffer's size. Requests end at `stop`, where the reader will probably
    finish; requests after it are small. A file from a server without range requests is held in memory."""

    def __init__(self, path: str, begin: int = 0, stop: int | None = None) -> None:
        self._at = begin
        self._stop = sys.maxsize if stop is None else stop
        self._system, self._name = fsspec.core.url_to_fs(path)
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset += self.use(end_of)
        elif whence == io.SEEK_CUR:
            offset += self._at
        self._at = offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        limit = self._stop - self._at if self._at < self._stop else PAST_STOP
        num_bytes = max(0, min(len(buffer), limit, self.use(end_of) - self._at))

        def read(file: Any) -> bytes:
            file.seek(self._at)
            return bytes(file.read(num_bytes))

        data = self.use(read)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        super().close()

    def use(self, function: Callable[[Any], Result]) -> Result:
        """Call `function` with the open file, with retries on HTTP; fsspec's other file systems retry internally."""

        def call() -> Result:
            if self._file is None:
                self._file = self._system.open(self._name, "rb", cache_type="none")
            try:
                return function(self._file)
            except ValueError:  # raised by fsspec for streams and servers without ranges
                self._file = io.BytesIO(self._system.cat_file(self._name))
                return function(self._file)

        if is_http(self._system):
            return persistently(call)
        try:
            return call()
        except Exception as problem:
            if type(problem).__module__.startswith("httpx"):  # the Hub's errors are not OSErrors
                raise OSError(str(problem) or type(problem).__name__) from problem
            raise


def end_of(file: Any) -> int:
    return int(file.seek(0, io.SEEK_END))


def is_http(system: fsspec.AbstractFileSystem) -> bool:
    protocols = [system.protocol] if isinstance(system.protocol, str) else system.protocol
    return "http" in protocols


def persistently(function: Callable[[], Result]) -> Result:
    """Call a function, with retries while the HTTP server is busy or unreachable."""
    import aiohttp

    last: Exception = OSError()
    for number in range(TRIES):
        if number:
            time.sleep(FIRST_WAIT_SECONDS * 2 ** (number - 1))
        try:
            return function()
        except (aiohttp.ClientError, OSError) as problem:
            last = problem
            cause = (
                problem if isinstance(problem, aiohttp.ClientResponseError) else problem.__cause__
            )
            if isinstance(cause, aiohttp.ClientResponseError):
                last = OSError(f"{cause.status} {cause.message}")
                if cause.status in (404, 410):
                    last = FileNotFoundError(2, "no such file")
                if cause.status < 500 and cause.status not in TRY_AGAIN:
                    raise last from problem
    raise OSError(f"{TRIES} requests failed: {str(last) or type(last).__name__}") from last


def is_url(path: str) -> bool:
    return "://" in path


def unsigned(url: str) -> str:
    """The URL of a file without the signature in its query, which is renewed while the file remains the same."""
    address, _, query = url.partition("?")
    fields = query.split("&")
    names = [field.partition("=")[0].lower() for field in fields]
    signing = [pattern for name, pattern in SIGNING.items() if name in names]
    if not signing:
        return url
    renewed = re.compile("|".join(signing))
    lasting = []
    for name, field in zip(names, fields, strict=True):
        if not renewed.fullmatch(name):
            lasting.append(field)
    return f"{address}?{'&'.join(lasting)}" if lasting else address


def disguise_of(path: str, content: bytes | None = None) -> tuple[str, str] | None:
    """The kind of a file by its first bytes, if it differs from its name: a reason and a sentence."""
    if content is None:
        with open_plain(path, stop=FIRST_BYTES) as file:
            content = file.read(FIRST_BYTES)
    start = content[:FIRST_BYTES]
    if start.startswith(POINTERS) and len(start) < FIRST_BYTES and len(start.splitlines()) < 5:
        return "pointer of Git LFS", "a pointer of Git LFS or git-annex, not the file itself"
    for magic, suffix in MAGIC_BYTES.items():
        if start.startswith(magic) and not path.lower().endswith(suffix):
            return "wrong suffix", f"it begins as a {suffix} file does"
    if compression_of(path) is not None and not PAGE.match(start):
        if not start:
            return "damaged file", "an empty file, expected a compressed one"
        try:
            with open_file(path) as unpacked:
                start = unpacked.read(FIRST_BYTES)
        except DAMAGE:
            return None  # the reader reports the damage
        if start.startswith(COMPRESSED_BYTES):
            return "wrong suffix", "it is compressed twice"
    if PAGE.match(start):
        return "page of HTML", "a page of HTML, not what its name says"
    return None


def compression_of(path: str) -> str | None:
    suffix = without_query(path).lower().rpartition(".")[2]
    return COMPRESSED_FILES.get(f".{suffix}")


def open_file(path: str, begin: int = 0, stop: int | None = None) -> BinaryIO:
    """Open a file decompressed, starting at byte `begin`."""
    if compression_of(path) is None:
        return open_plain(path, begin, stop)
    if compression_of(path) == "gzip":  # unlike pyarrow's, it passes over zeros at the end
        unpacked = gzip.GzipFile(fileobj=open_plain(path))
        return cast(BinaryIO, io.BufferedReader(unpacked, SMALL_BUFFER))
    stream: Any = pa.CompressedInputStream(
        pa.PythonFile(open_plain(path), mode="r"), compression_of(path)
    )
    return cast(BinaryIO, io.BufferedReader(stream, SMALL_BUFFER))


def open_plain(path: str, begin: int = 0, stop: int | None = None) -> BinaryIO:
    if is_url(path):
        return io.BufferedReader(RemoteFile(path, begin, stop), REMOTE_BUFFER)
    file = open(path, "rb", buffering=BUFFER)  # noqa: SIM115
    if begin:
        file.seek(begin)
    return file


def open_random(path: str) -> Any:
    """Open a file for pyarrow; a compressed file is decompressed in memory."""
    if compression_of(path) is None:
        if is_url(path):
            return io.BufferedReader(RemoteFile(path), SMALL_BUFFER)
        return path
    with open_file(path) as file:
        return pa.BufferReader(file.read())
