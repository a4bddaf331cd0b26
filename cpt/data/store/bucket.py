"""A store in a bucket: what one machine made, kept where all others find it. $CPT_STORE is its place, any URL that
fsspec opens.

    tokens/SOURCE/SHARD.tar       a shard's arrays and their description
    tokens/SOURCE/description.json    its manifest, written when all shards are there: without it there is nothing to
    be seen rows/SOURCE/windows.npy, total.json    where which rows are duplicates/COMPARED.tar       which documents
    were there before

Names are those of the store on a disk (`store.py`), and tell all that decides the content. Objects are never changed,
only written anew with the same content, so that it does not matter how many machines write at once."""

import os
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Any, TypeVar

import fsspec
from xxhash import xxh3_128

from cpt.data.readers.values import first_line
from cpt.errors import DataError, ResourceError
from cpt.files import NO_SPACE

VARIABLE = "CPT_STORE"
DIGEST = 32  # bytes at the end of an object, behind the archive: xxh3-128 of what is in front of them
BLOCK = 1 << 20
Result = TypeVar("Result")


def bucket() -> "Bucket | None":
    """The one that $CPT_STORE names, if it names one.

    Raises:
        ResourceError: it is no URL that can be opened here.
    """
    url = os.environ.get(VARIABLE, "")
    return opened(url.rstrip("/")) if url else None


@lru_cache(maxsize=4)
def opened(url: str) -> "Bucket":
    if "://" not in url:
        raise ResourceError(
            f"{VARIABLE} is `{url}`, expected a URL: s3://bucket/prefix. A folder that machines share is CPT_CACHE."
        )
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as problem:
        raise ResourceError(
            f"{VARIABLE}={url}: {first_line(problem)}. Install what fsspec needs for it (s3://: pip install s3fs)."
        ) from problem
    return Bucket(url, system, str(root).rstrip("/"))


@dataclass(frozen=True)
class Bucket:
    url: str
    system: Any
    """Of fsspec."""
    root: str

    def read(self, name: str) -> bytes | None:
        """A small object; None where there is none."""
        return self._ask(name, lambda: bytes(self.system.cat_file(f"{self.root}/{name}")))

    def write(self, name: str, content: bytes) -> None:
        self._tell(name, lambda: self._pipe(name, content))

    def has(self, name: str) -> bool:
        return bool(self._ask(name, lambda: self.system.exists(f"{self.root}/{name}")))

    def names(self, folder: str) -> set[str]:
        """The objects of a folder, by their name in it, from one listing."""

        def listed() -> set[str]:
            self.system.invalidate_cache()
            return {str(path).rsplit("/", 1)[-1] for path in self.system.ls(f"{self.root}/{folder}", detail=False)}

        return self._ask(folder, listed) or set()

    def put_folder(self, folder: Path, name: str) -> None:
        with tempfile.NamedTemporaryFile(dir=folder.parent, suffix=".unfinished") as packed:
            with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for path in sorted(folder.iterdir()):
                    tar.add(path, path.name, filter=without_circumstances)
            packed.seek(0)
            packed.write(digest_of(packed).encode())
            packed.flush()
            self._tell(name, lambda: self._put(packed.name, name))

    def get_folder(self, name: str, folder: Path) -> bool:
        """Write the files of an object into an empty folder; False where there is no such object.

        Raises:
            DataError: it is damaged.
            OSError: the disk is full.
        """
        packed = folder / ".packed"
        for _ in range(2):  # what the network damaged comes whole the second time
            if self._ask(name, lambda: [self.system.get_file(f"{self.root}/{name}", str(packed))]) is None:
                packed.unlink(missing_ok=True)
                return False
            if is_sound(packed):
                unpack(packed, folder)
                packed.unlink()
                return True
        raise self.damaged(name)

    def damaged(self, name: str) -> DataError:
        """What to say of an object that is not what was written."""
        return DataError(
            f"{self.url}/{name}: not what was written, its digest is another. Delete it, and run `cpt prepare` again."
        )

    def missing(self, name: str) -> DataError:
        return DataError(
            f"{self.url}/{name}: not there, though the manifest lists it. Run `cpt prepare` again where {VARIABLE} is"
            " the same."
        )

    def _pipe(self, name: str, content: bytes) -> None:
        self.system.makedirs(f"{self.root}/{name}".rsplit("/", 1)[0], exist_ok=True)
        self.system.pipe_file(f"{self.root}/{name}", content)

    def _put(self, file: str, name: str) -> None:
        self.system.makedirs(f"{self.root}/{name}".rsplit("/", 1)[0], exist_ok=True)
        self.system.put_file(file, f"{self.root}/{name}")

    def _ask(self, name: str, function: Callable[[], Result]) -> Result | None:
        """What a function gives; None where the object is not there."""
        try:
            return self._tell(name, function)
        except FileNotFoundError:
            return None

    def _tell(self, name: str, function: Callable[[], Result]) -> Result:
        """Call a function of the file system, which retries by itself.

        Raises:
            ResourceError: it refuses, or cannot be reached.
            FileNotFoundError: there is no such object.
            OSError: the local disk is full.
        """
        try:
            return function()
        except FileNotFoundError:
            raise
        except PermissionError as problem:
            raise ResourceError(
                f"{self.url}/{name}: refused ({first_line(problem)}). Check the credentials of this machine."
            ) from problem
        except Exception as problem:  # each of fsspec's systems has errors of its own, many no OSError
            if isinstance(problem, OSError) and problem.errno in NO_SPACE:
                raise
            raise ResourceError(
                f"{self.url}/{name}: {first_line(problem)}. Check the network and {VARIABLE}."
            ) from problem


def digest_of(file: IO[bytes], num_bytes: int | None = None) -> str:
    """xxh3-128 of a file from where it stands, of so many bytes or to its end."""
    digest = xxh3_128()
    while block := file.read(BLOCK if num_bytes is None else min(BLOCK, num_bytes)):
        digest.update(block)
        num_bytes = None if num_bytes is None else num_bytes - len(block)
    return digest.hexdigest()


def is_sound(packed: Path) -> bool:
    with packed.open("rb") as file:
        size = packed.stat().st_size - DIGEST
        return size > 0 and digest_of(file, size).encode() == file.read()


def unpack(packed: Path, folder: Path) -> None:
    """The files of an object; names that would lead out of the folder are none of ours."""
    with tarfile.open(packed) as tar:
        for member in tar:
            if member.isfile() and "/" not in member.name and (file := tar.extractfile(member)) is not None:
                with (folder / member.name).open("wb") as unpacked:
                    copyfileobj(file, unpacked)


def without_circumstances(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime = member.uid = member.gid = 0
    member.uname = member.gname = ""
    member.mode = 0o644
    return member
