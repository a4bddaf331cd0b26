"""What a checkpoint holds: `manifest.json` names each file with its size and hash, and is written last."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from cpt.errors import CheckpointError
from cpt.files import sealed, size_and_hash, unsealed, write_atomic

MANIFEST = "manifest.json"
FORMAT = 1
FILES_AT_ONCE = min(8, os.cpu_count() or 1)
READ_WHEN_LOADING = (".safetensors", ".bin", ".pt", ".pth", ".index.json", "adapter_config.json")


@dataclass(frozen=True)
class FileEntry:
    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, and all of its files."""

    format: int
    kind: Literal["full", "weights"]
    """`full` can be resumed from; `weights` is the model alone."""
    step: int
    tokens: int
    world_size: int
    zero_stage: int | None
    """DeepSpeed's stage; None for plain runs and DDP."""
    exactness: str
    """How a resumed run compares with an uninterrupted one: `bit-exact`, or `elastic: ...` with the reason."""
    versions: dict[str, str]
    files: dict[str, FileEntry]
    """By their path from the checkpoint's folder; without the manifest itself."""


@dataclass(frozen=True)
class CheckpointDamage:
    """One difference from what was written."""

    file: str
    """Its path from the checkpoint's folder."""
    what: str
    """`missing`, `size`, `hash`, `unknown file`, `unreadable`, or for the manifest what is wrong with it."""
    details: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}{f' ({self.details})' if self.details else ''}"


def damages(folder: Path) -> list[CheckpointDamage]:
    """All differences from the manifest. Files are read only if all names and sizes are right."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as problem:
        return [CheckpointDamage(MANIFEST, "no sound manifest", str(problem))]
    return wrong_names_and_sizes(folder, manifest) or wrong_contents(folder, manifest.files)


def wrong_names_and_sizes(folder: Path, manifest: Manifest) -> list[CheckpointDamage]:
    found = []
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(CheckpointDamage(name, "missing"))
        elif (size := path.stat().st_size) != entry.size:
            found.append(CheckpointDamage(name, "size", f"{size:,} bytes instead of {entry.size:,}"))
    for path in sorted(folder.rglob("*")):  # a new file of weights may change what is loaded
        name = path.relative_to(folder).as_posix()
        if name not in manifest.files and name.endswith(READ_WHEN_LOADING) and not path.name.startswith("."):
            found.append(CheckpointDamage(name, "unknown file", "it was not there when the checkpoint was written"))
    return found


def wrong_contents(folder: Path, files: Mapping[str, FileEntry]) -> list[CheckpointDamage]:
    """Files whose bytes differ from those that were written; several are read at a time."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        found = pool.map(lambda name: wrong_content(folder, name, files[name]), files)
        return [damage for damage in found if damage is not None]


def wrong_content(folder: Path, name: str, entry: FileEntry) -> CheckpointDamage | None:
    try:
        found = hash_file(folder / name)
    except OSError as problem:
        return CheckpointDamage(name, "unreadable", str(problem.strerror))
    return None if found == entry else CheckpointDamage(name, "hash", f"{found.xxh3_128} instead of {entry.xxh3_128}")


def hash_file(path: Path) -> FileEntry:
    return FileEntry(*size_and_hash(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, whole or not at all, and durable; the files that it names must be durable before."""
    write_atomic(folder / MANIFEST, sealed(asdict(manifest), indent=1) + "\n", durable=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, of another format, or names a file outside the folder.
    """
    path = folder / MANIFEST
    try:
        content = unsealed(path.read_bytes())
        if content["format"] == FORMAT:
            return manifest_of(content)
    except FileNotFoundError as problem:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: its save did not finish, or cpt did not write it."
        ) from problem
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem!r}") from problem
    raise CheckpointError(
        f"{path} has format {content['format']!r}, and this cpt reads {FORMAT}. Use the version of cpt that wrote it."
    )


def manifest_of(content: dict[str, Any]) -> Manifest:
    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name} is outside the checkpoint")
    return Manifest(**{**content, "files": files})
