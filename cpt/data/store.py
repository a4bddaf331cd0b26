"""Keep arrays in a folder that is either complete or not there, however many processes want it and whenever they die."""

import fcntl
import json
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_hexdigest

from cpt.errors import DataError, ResourceError

FORMAT = 2  # of a token store; counts up when old folders must not be read
DESCRIPTION = "description.json"
ARRAYS: dict[str, str] = {
    "tokens": "",
    "offsets": "int64",
    "hashes": "uint64",
    "num_bytes": "int64",
}  # the ids' type depends on the vocabulary
BLOCK = 1 << 23  # bytes


def default_cache_dir() -> Path:
    """$CPT_CACHE, or ~/.cache/cpt."""
    return Path(os.environ.get("CPT_CACHE") or "~/.cache/cpt").expanduser()


def key_of(content: dict[str, Any]) -> str:
    """The name of a folder that holds what `content` describes: equal content, equal name."""
    return xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def publish_once(folder: Path, fill: Callable[[Path], None], *, durable: bool = True) -> Path:
    """Make `folder` by calling `fill` on a folder beside it, then rename; where it exists already, do nothing.

    One process fills, others wait for it. What a killed process left behind is removed by the next one.

    Args:
        durable: wait for the disk, so that it stands a power cut; without, only the death of processes.

    Raises:
        ResourceError: the disk is full or not writable.
    """
    if folder.exists():
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with lock_file(folder).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it when this process dies
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    fill(unfinished)
                    for file in [*unfinished.iterdir(), unfinished] if durable else []:
                        sync(file)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)  # gone already where all went well
                if durable:
                    sync(folder.parent)
    except OSError as problem:
        what = f"{folder.parent}: cannot keep tokenised data there ({problem.strerror or problem})"
        raise ResourceError(f"{what}. Free space, or set CPT_CACHE to another folder.") from problem
    return folder


def lock_file(folder: Path) -> Path:
    """Beside the folder; locked by the process that makes it."""
    return folder.with_name(folder.name + ".lock")


def hold(folder: Path, holder: object) -> None:
    """Keep `cpt store prune` away from a folder as long as `holder` lives; the folder's time says when it was last used.

    Raises:
        OSError: there is no such folder.
    """
    handle = os.open(folder, os.O_RDONLY)
    weakref.finalize(holder, os.close, handle)
    fcntl.flock(handle, fcntl.LOCK_SH)
    with suppress(OSError):  # a store that is only readable
        os.utime(handle)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, so that a power cut leaves no complete-looking folder of zeros."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class StoreDescription:
    """What stands beside the arrays of a token store."""

    documents: int
    tokens: int
    dtype: str
    dropped: dict[str, int]
    """Reason -> documents that filters did not let pass."""
    bad_rows: dict[str, int]
    """Reason -> rows that were no documents; bad_rows.jsonl lists them."""
    longest: tuple[str, int]
    """Where the longest document stands, and its tokens."""
    files: dict[str, str]
    """File -> xxh3-128 of its content."""
    digest: str
    """Of the arrays."""
    made_from: dict[str, str]
    """Source, tokenizer and the library that tokenised, for people."""
    format: int = FORMAT


class TokenWriter:
    """Appends documents to a new store; nothing is kept in memory."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.folder, self.dtypes = folder, {**ARRAYS, "tokens": dtype.name}
        self.num_documents = self.num_tokens = 0
        self._digests = {name: xxh3_128() for name in ARRAYS}
        self._files = {name: (folder / f"{name}.bin").open("wb") for name in ARRAYS}
        self._write("offsets", np.zeros(1, np.int64))

    def append(self, ids: NDArray[Any], lengths: NDArray[np.int64], hashes: NDArray[np.uint64], num_bytes: NDArray[np.int64]) -> None:
        """Add documents: all their ids, and of each its length, the hash of its text and the text's size."""
        self._write("tokens", ids)
        self._write("offsets", self.num_tokens + lengths.cumsum())
        self._write("hashes", hashes)
        self._write("num_bytes", num_bytes)
        self.num_documents += len(lengths)
        self.num_tokens += len(ids)

    def copy(self, other: "TokenStore") -> bool:
        """Add all documents of another store; False if it is not what was written there once."""
        digests = {name: xxh3_128() for name in ARRAYS}
        first_token = self.num_tokens
        for name in ARRAYS:
            array = vars(other)[name]
            for start in range(0, len(array), BLOCK // array.itemsize):
                block = array[start : start + BLOCK // array.itemsize]
                digests[name].update(block.data)
                self._write(name, block if name != "offsets" else block[1 if start == 0 else 0 :] + first_token)
        self.num_documents += other.description.documents
        self.num_tokens += other.description.tokens
        return digest_of(digests) == other.description.digest

    def close(
        self,
        dropped: Mapping[str, int],
        files: Mapping[str, str],
        *,
        bad_rows: Mapping[str, int] | None = None,
        longest: tuple[str, int] = ("", 0),
        made_from: Mapping[str, str] | None = None,
    ) -> None:
        """Write what the tokens are found by."""
        for file in self._files.values():
            file.close()
        description = StoreDescription(
            self.num_documents,
            self.num_tokens,
            self.dtypes["tokens"],
            dict(dropped),
            dict(bad_rows or {}),
            longest,
            dict(files),
            digest_of(self._digests),
            dict(made_from or {}),
        )
        (self.folder / DESCRIPTION).write_text(json.dumps(asdict(description), indent=1))

    def _write(self, name: str, array: NDArray[Any]) -> None:
        raw = np.ascontiguousarray(array, self.dtypes[name])
        self._files[name].write(raw.data)
        self._digests[name].update(raw.data)


class TokenStore:
    """The tokens of one source, memory-mapped.

    Attributes:
        tokens: the ids of all documents, one after the other.
        offsets: where each document begins in `tokens`, and where the last one ends.
        hashes: xxh3-64 of each document's text.
        num_bytes: UTF-8 bytes of each document's text.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            hold(folder, self)
            self.description = read_description(folder)
            documents, tokens = self.description.documents, self.description.tokens
            self.tokens: NDArray[np.unsignedinteger] = open_raw(folder / "tokens.bin", self.description.dtype, tokens)
            self.offsets: NDArray[np.int64] = open_raw(folder / "offsets.bin", "int64", documents + 1)
            self.hashes: NDArray[np.uint64] = open_raw(folder / "hashes.bin", "uint64", documents)
            self.num_bytes: NDArray[np.int64] = open_raw(folder / "num_bytes.bin", "int64", documents)
        except (OSError, ValueError, TypeError) as problem:
            raise DataError(f"{folder}: the stored tokens are damaged ({problem}). Delete the folder; it is made again.") from problem

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        """Worker processes open the files themselves."""
        return TokenStore, (self.folder,)

    def digest(self) -> str:
        """Of the arrays as they are now; `description.digest` is what it was."""
        digests = {name: xxh3_128() for name in ARRAYS}
        for name, digest in digests.items():
            array = vars(self)[name]
            for start in range(0, len(array), BLOCK):
                digest.update(array[start : start + BLOCK].data)
        return digest_of(digests)


def read_description(folder: Path) -> StoreDescription:
    """What stands beside the arrays.

    Raises:
        DataError: another version of cpt made the folder.
        OSError, ValueError, TypeError: it is damaged.
    """
    content = json.loads((folder / DESCRIPTION).read_text())
    if content.get("format") != FORMAT:
        raise DataError(
            f"{folder}: made by another version of cpt (format {content.get('format', 1)}, ours is {FORMAT}); it is not read. Remove it: "
            "cpt store prune --leftovers."
        )
    return StoreDescription(**{**content, "longest": tuple(content["longest"])})


def digest_of(digests: Mapping[str, xxh3_128]) -> str:
    """One digest of the arrays' digests."""
    return xxh3_128_hexdigest(" ".join(digest.hexdigest() for digest in digests.values()).encode())


def open_array(path: Path) -> NDArray[Any]:
    """A memory-mapped .npy file without the cost of numpy's memmap class on every slice."""
    return np.asarray(np.load(path, mmap_mode="r"))


def open_raw(path: Path, dtype: str, length: int) -> NDArray[Any]:
    """A memory-mapped array of exactly `length`.

    Raises:
        ValueError: the file has another length.
    """
    if path.stat().st_size != length * np.dtype(dtype).itemsize:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, expected {length * np.dtype(dtype).itemsize:,}")
    return np.asarray(np.memmap(path, dtype, "r", shape=(length,))) if length else np.empty(0, dtype)
