"""Keep arrays in a folder that is either complete or not there, however many processes want it and whenever they die."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128, xxh3_128_hexdigest

from cpt.data.tokenization import Ids
from cpt.errors import DataError, ResourceError

DESCRIPTION = "description.json"


def default_cache_dir() -> Path:
    """$CPT_CACHE, or ~/.cache/cpt."""
    return Path(os.environ.get("CPT_CACHE") or "~/.cache/cpt").expanduser()


def key_of(content: dict[str, Any]) -> str:
    """The name of a folder that holds what `content` describes: equal content, equal name."""
    return xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def publish_once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """Make `folder` by calling `fill` on a folder beside it, then rename; where it exists already, do nothing.

    One process fills, others wait for it. What a killed process left behind is removed by the next one.

    Raises:
        ResourceError: the disk is full or not writable.
    """
    if folder.exists():
        return folder
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(folder.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel frees it when this process dies
            if not folder.exists():
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir()
                try:
                    fill(unfinished)
                    for file in [*unfinished.iterdir(), unfinished]:
                        sync(file)
                    unfinished.rename(folder)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)  # gone already where all went well
                sync(folder.parent)
    except OSError as problem:
        what = f"{folder.parent}: cannot keep tokenised data there ({problem.strerror or problem})"
        raise ResourceError(f"{what}. Free space, or set CPT_CACHE to another folder.") from problem
    return folder


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
    files: dict[str, str]
    digest: str


class TokenWriter:
    """Appends documents to a new store."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self.folder, self.dtype = folder, dtype
        self.lengths: list[NDArray[np.int64]] = []
        self.hashes: list[int] = []
        self.num_bytes: list[int] = []
        self._digest = xxh3_128()
        self._file = (folder / "tokens.bin").open("wb")

    def append(self, ids: Ids, lengths: NDArray[np.int64], hashes: list[int], num_bytes: list[int]) -> None:
        """Add documents: all their ids, and of each its length, the hash of its text and the text's size."""
        raw = ids.astype(self.dtype, copy=False).tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        self.lengths.append(lengths)
        self.hashes += hashes
        self.num_bytes += num_bytes

    def close(self, dropped: dict[str, int], files: dict[str, str]) -> None:
        """Write what the tokens are found by."""
        self._file.close()
        offsets = np.concatenate([np.zeros(1, np.int64), *self.lengths]).cumsum()
        hashes = np.array(self.hashes, np.uint64)
        self._digest.update(offsets.tobytes())
        self._digest.update(hashes.tobytes())
        np.save(self.folder / "offsets.npy", offsets)
        np.save(self.folder / "hashes.npy", hashes)
        np.save(self.folder / "num_bytes.npy", np.array(self.num_bytes, np.int64))
        description = StoreDescription(len(hashes), int(offsets[-1]), self.dtype.name, dropped, files, self._digest.hexdigest())
        (self.folder / DESCRIPTION).write_text(json.dumps(asdict(description), indent=1))


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
            self.description = StoreDescription(**json.loads((folder / DESCRIPTION).read_text()))
            self.tokens: Ids = np.asarray(
                np.memmap(folder / "tokens.bin", np.dtype(self.description.dtype), "r", shape=(self.description.tokens,))
            )
            self.offsets, self.hashes, self.num_bytes = (
                open_array(folder / name) for name in ("offsets.npy", "hashes.npy", "num_bytes.npy")
            )
        except (OSError, ValueError, TypeError) as problem:
            raise DataError(f"{folder}: the stored tokens are damaged ({problem}). Delete the folder; it is made again.") from problem

    def __reduce__(self) -> tuple[type["TokenStore"], tuple[Path]]:
        """Worker processes open the files themselves."""
        return TokenStore, (self.folder,)


def open_array(path: Path) -> NDArray[Any]:
    """A memory-mapped array without the cost of numpy's memmap class on every slice."""
    return np.asarray(np.load(path, mmap_mode="r"))
