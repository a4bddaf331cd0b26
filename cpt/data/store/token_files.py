"""Tokenised documents as files: written in batches, memory-mapped, verified by digest, shared through a bucket."""

import json
import mmap
import os
import tarfile
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_hexdigest

from cpt.cache import key_of
from cpt.data.readers.documents import first_line
from cpt.data.store.text_loss import TextLoss
from cpt.errors import DataError, ResourceError
from cpt.files import NO_SPACE, hash_of, make_durable, sealed, unsealed

Int64 = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Mask = NDArray[np.bool_]
FORMAT = 5  # version of stored tokens; incremented when old folders must not be read
DESCRIPTION = "description.json"
# The dtype of ids depends on the vocabulary.
ARRAYS = {
    "tokens": "",
    "offsets": "int64",
    "hashes": "uint64",
    "num_bytes": "int64",
    "segments": "uint8",
}
VARIABLE = "CPT_STORE"


@dataclass(frozen=True)
class ShardDescription:
    documents: int
    tokens: int
    dtype: str
    digest: str
    segmented: bool  # the documents are examples with a segment for each token
    dropped: dict[str, int]  # reason -> documents that a filter dropped
    bad_rows: dict[str, int]  # reason -> rows; bad_rows.jsonl lists them
    longest: tuple[str, int]  # file and line of the longest document; its tokens
    engine: str
    texts: str  # xxh3-128 over the hashes of the texts
    dropped_bytes: dict[str, int] | None = None
    """Reason -> bytes that were read and not stored, of bad rows too; None: written by an earlier version."""
    format: int = FORMAT
    text_loss: TextLoss | None = None  # of a sample and all held-out texts; None: not compared
    spelled: dict[str, int] = field(default_factory=dict)  # special token -> times it is in texts
    spelled_at: str = ""  # file and line of the first one
    contents: str | None = None  # xxh3-128 of the bytes of local files that it was made from


class TokenWriter:
    """Appends documents to a new folder; nothing is held in memory."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], *, segmented: bool = False) -> None:
        self.folder = folder
        self.dtypes = {**ARRAYS, "tokens": dtype.name}
        self.num_documents = 0
        self.num_tokens = 0
        names = array_names(segmented)
        self._digests = {name: xxh3_128() for name in names}
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in names}
        self._write("offsets", np.zeros(1, np.int64))

    def append(
        self,
        ids: NDArray[Any],
        lengths: Int64,
        hashes: Hashes,
        num_bytes: Int64,
        segments: NDArray[np.uint8] | None = None,
    ) -> None:
        """Add documents: all ids and segments, and for each document its length, text hash and size."""
        offsets = self.num_tokens + lengths.cumsum()
        for name, array in zip(ARRAYS, (ids, offsets, hashes, num_bytes, segments), strict=True):
            if array is not None:
                self._write(name, array)
        self.num_documents += len(lengths)
        self.num_tokens += len(ids)

    def close(self, **described: Any) -> None:
        """Write the description; `described` are further fields of `ShardDescription`."""
        for file in self._files.values():
            file.close()
        description = ShardDescription(
            documents=self.num_documents,
            tokens=self.num_tokens,
            dtype=self.dtypes["tokens"],
            digest=digest_of([digest.hexdigest() for digest in self._digests.values()]),
            segmented="segments" in self._files,
            **described,
        )
        (self.folder / DESCRIPTION).write_text(as_text(description))

    def _write(self, name: str, array: NDArray[Any]) -> None:
        raw = np.ascontiguousarray(array, self.dtypes[name])
        self._files[name].write(raw.data)
        self._digests[name].update(raw.data)


class TokenFiles:
    """The documents of one folder, memory-mapped.

    `offsets`: the start of each document in `tokens`, and the end of the last one. `hashes` (xxh3-64) and `num_bytes`
    (UTF-8): of each document's text. `segments`: of the tokens of examples.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            content = read_content((folder / DESCRIPTION).read_bytes())
            content.pop("scored", None)  # earlier versions could store a score of each document
            if content.get("text_loss") is not None:
                content["text_loss"] = TextLoss(**content["text_loss"])
            self.description = ShardDescription(**content)
            self.written = (folder / DESCRIPTION).stat().st_mtime_ns
            dtype = self.description.dtype
            documents = self.description.documents
            tokens = self.description.tokens
            self.tokens: NDArray[np.unsignedinteger] = open_raw(
                folder / "tokens.bin", dtype, tokens
            )
            self.offsets: Int64 = open_raw(folder / "offsets.bin", "int64", documents + 1)
            self.hashes: Hashes = open_raw(folder / "hashes.bin", "uint64", documents)
            self.num_bytes: Int64 = open_raw(folder / "num_bytes.bin", "int64", documents)
            self.segments = np.empty(0, np.uint8)
            if self.description.segmented:
                self.segments = open_raw(folder / "segments.bin", "uint8", tokens)
        except (OSError, ValueError, TypeError) as problem:
            raise DataError(
                f"{folder}: the stored tokens are damaged ({problem}). Delete the folder; it is built again."
            ) from problem

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return TokenFiles, (self.folder,)

    def is_intact(self) -> bool:
        """Whether the arrays match their digests; reads them without the mapping, which would keep them in memory."""
        names = array_names(self.description.segmented)
        hashes = [hash_of(self.folder / f"{name}.bin") for name in names]
        return digest_of(hashes) == self.description.digest

    def free_memory(self) -> None:
        """Release the memory of the mapped tokens; they are mapped again on the next read."""
        for array in (self.tokens, self.segments):
            mapped = array.base.base if isinstance(array.base, np.memmap) else None
            if isinstance(mapped, mmap.mmap):
                mapped.madvise(mmap.MADV_DONTNEED)

    def sync(self) -> None:
        for path in [*self.folder.iterdir(), self.folder]:
            make_durable(path)


class StoredDocuments:
    """The documents of several folders, concatenated."""

    def __init__(self, parts: Sequence[TokenFiles]) -> None:
        self.parts = list(parts)
        self._first_tokens = [0, *accumulate(part.description.tokens for part in self.parts)]

    def __len__(self) -> int:
        return sum(part.description.documents for part in self.parts)

    @property
    def num_tokens(self) -> int:
        return self._first_tokens[-1]

    @cached_property
    def are_examples(self) -> bool:
        return any(part.description.segmented for part in self.parts)

    @cached_property
    def digest(self) -> str:
        return key_of({"parts": [part.description.digest for part in self.parts]})

    @property
    def offsets(self) -> Int64:
        """The start of each document among the tokens, and the end of the last one."""
        begins = []
        for part, first in zip(self.parts, self._first_tokens, strict=False):
            begins.append(part.offsets[:-1] + first)
        return np.concatenate([*begins, np.array([self.num_tokens], np.int64)])

    @property
    def hashes(self) -> Hashes:
        return np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in self.parts)])

    @property
    def num_bytes(self) -> Int64:
        return np.concatenate([np.empty(0, np.int64), *(part.num_bytes for part in self.parts)])

    def free_memory(self) -> None:
        for part in self.parts:
            part.free_memory()

    def tokens(self, start: int, length: int) -> NDArray[np.unsignedinteger]:
        part, begin = self._part_at(start)
        return part.tokens[begin : begin + length]

    def segments(self, start: int, length: int) -> NDArray[np.uint8]:
        part, begin = self._part_at(start)
        return part.segments[begin : begin + length]

    def _part_at(self, start: int) -> tuple[TokenFiles, int]:
        """The folder of a token, and its offset there; a document is never split over folders."""
        part = bisect_right(self._first_tokens, start) - 1 if len(self.parts) > 1 else 0
        return self.parts[part], start - self._first_tokens[part]


def array_names(segmented: bool) -> list[str]:
    return [name for name in ARRAYS if segmented or name != "segments"]


def is_intact_shard(folder: Path) -> bool:
    try:
        return TokenFiles(folder).is_intact()
    except DataError:
        return False


def digest_of(digests: Sequence[str]) -> str:
    return xxh3_128_hexdigest(" ".join(digests).encode())


def open_raw(path: Path, dtype: str, length: int) -> NDArray[Any]:
    size = path.stat().st_size
    expected = length * np.dtype(dtype).itemsize
    if size != expected:
        raise ValueError(f"{path.name} has {size:,} bytes, expected {expected:,}")
    if not length:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=(length,)))


@dataclass(frozen=True)
class SourceDescription:
    name: str  # name of the source, with the state of its files
    documents: int
    tokens: int
    shards: dict[str, str]  # name -> digest, in the order of the source
    dropped: dict[str, int]
    bad_rows: dict[str, int]
    longest: tuple[str, int]
    files: dict[str, str]
    """File -> xxh3-128 of its content, or for a URL the server's version of it."""
    made_from: dict[str, str]
    format: int = FORMAT


def as_text(description: ShardDescription | SourceDescription) -> str:
    return sealed(asdict(description), indent=1)


def read_description(folder: Path) -> SourceDescription:
    text = (folder / DESCRIPTION).read_bytes()
    stored_format = json.loads(text).get("format", 1)
    if stored_format != FORMAT:
        raise DataError(
            f"{folder}: written by another version of cpt (format {stored_format}, this version needs {FORMAT})."
            " Remove it: cpt store prune."
        )
    return SourceDescription(**read_content(text))


def read_content(text: bytes) -> dict[str, Any]:
    content = unsealed(text)
    return {**content, "longest": tuple(content["longest"])}


def bucket() -> "Bucket | None":
    url = os.environ.get(VARIABLE, "").rstrip("/")
    if not url:
        return None
    if "://" not in url:
        raise ResourceError(
            f"{VARIABLE} is `{url}`, expected a URL: s3://bucket/prefix. To share a folder, set CPT_CACHE."
        )
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as problem:
        raise ResourceError(
            f"{VARIABLE}={url}: {first_line(problem)}. Install its fsspec package (s3://: pip install s3fs)."
        ) from problem
    return Bucket(url, system, str(root).rstrip("/"))


@dataclass(frozen=True)
class Bucket:
    url: str
    system: Any
    root: str

    def shards(self, source: Path) -> set[str]:
        self.system.invalidate_cache()
        paths = self._call(
            source.name, self.system.ls, f"{self.root}/tokens/{source.name}", detail=False
        )
        return {Path(path).stem for path in paths or ()}

    def put(self, shard: Path) -> None:
        name = object_of(shard)
        with tempfile.NamedTemporaryFile(dir=shard.parent, suffix=".unfinished") as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                for path in sorted(shard.iterdir()):
                    tar.add(path, path.name)
            packed.flush()
            self._call(
                name, self.system.makedirs, f"{self.root}/tokens/{shard.parent.name}", exist_ok=True
            )
            self._call(name, self.system.put_file, packed.name, f"{self.root}/{name}")

    def get(self, shard: Path, folder: Path) -> bool:
        """Write the files of a shard into an empty folder; False if the bucket does not have the shard."""
        packed = folder / ".packed"
        name = object_of(shard)
        self._call(name, self.system.get_file, f"{self.root}/{name}", str(packed))
        if not packed.exists():
            return False
        try:
            with tarfile.open(packed) as tar:
                tar.extractall(folder, filter="data")
        except tarfile.TarError as problem:
            raise self.damaged(shard) from problem
        packed.unlink()
        return True

    def damaged(self, shard: Path) -> DataError:
        return DataError(
            f"{self.url}/{object_of(shard)}: damaged. Delete the object and run `cpt prepare` again."
        )

    def _call(
        self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any
    ) -> Any:
        """Call the file system, which retries automatically; None if the object does not exist."""
        try:
            return function(*arguments, **options)
        except FileNotFoundError:
            return None
        except Exception as problem:  # fsspec's file systems raise many classes
            if isinstance(problem, OSError) and problem.errno in NO_SPACE:
                raise
            raise ResourceError(
                f"{self.url}/{name}: {first_line(problem)}. Check the network, the credentials of this machine and"
                f" {VARIABLE}."
            ) from problem


def object_of(shard: Path) -> str:
    return f"tokens/{shard.parent.name}/{shard.name}.tar"
