"""Shards of tokens in a bucket: a shard that one machine made is fetched by the others instead of made again.

$CPT_STORE is the place, any URL that fsspec opens. The object of a shard is tokens/SOURCE/SHARD.tar, with the names of
source and shard in the store on a disk. These names follow from all that decides the content, so several machines may
write the same object at the same time.
"""

import os
import tarfile
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec

from cpt.data.readers.documents import first_line
from cpt.errors import DataError, ResourceError
from cpt.files import NO_SPACE

VARIABLE = "CPT_STORE"


def bucket() -> "Bucket | None":
    """The bucket that $CPT_STORE names, if any."""
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
    root: str

    def shards(self, source: Path) -> set[str]:
        """The names of a source's shards that are in the bucket, from one listing."""
        self.system.invalidate_cache()
        paths = self._call(source.name, self.system.ls, f"{self.root}/tokens/{source.name}", detail=False)
        return {Path(path).stem for path in paths or ()}

    def put(self, shard: Path) -> None:
        name = object_of(shard.parent, shard.name)
        with tempfile.NamedTemporaryFile(dir=shard.parent, suffix=".unfinished") as packed:
            with tarfile.open(fileobj=packed, mode="w") as tar:
                for path in sorted(shard.iterdir()):
                    tar.add(path, path.name)
            packed.flush()
            self._call(name, self.system.makedirs, f"{self.root}/tokens/{shard.parent.name}", exist_ok=True)
            self._call(name, self.system.put_file, packed.name, f"{self.root}/{name}")

    def get(self, source: Path, shard: str, folder: Path) -> bool:
        """Write the files of a shard into an empty folder; False where the bucket does not have the shard."""
        packed, name = folder / ".packed", object_of(source, shard)
        self._call(name, self.system.get_file, f"{self.root}/{name}", str(packed))
        if not packed.exists():
            return False
        try:
            with tarfile.open(packed) as tar:
                tar.extractall(folder, filter="data")
        except tarfile.TarError as problem:
            raise self.damaged(source, shard) from problem
        packed.unlink()
        return True

    def damaged(self, source: Path, shard: str) -> DataError:
        return DataError(
            f"{self.url}/{object_of(source, shard)}: damaged. Delete the object and run `cpt prepare` again."
        )

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call the file system, which retries automatically; None if the object does not exist."""
        try:
            return function(*arguments, **options)
        except FileNotFoundError:
            return None
        except Exception as problem:  # fsspec's file systems raise many classes of errors
            if isinstance(problem, OSError) and problem.errno in NO_SPACE:
                raise
            raise ResourceError(
                f"{self.url}/{name}: {first_line(problem)}. Check the network, the credentials of this machine and"
                f" {VARIABLE}."
            ) from problem


def object_of(source: Path, shard: str) -> str:
    return f"tokens/{source.name}/{shard}.tar"
