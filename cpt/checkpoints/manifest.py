"""What a checkpoint holds: `manifest.json` names each file with its size and hash, and is written last."""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from xxhash import xxh3_128_hexdigest

from cpt.errors import CheckpointError
from cpt.files import size_and_hash

MANIFEST = "manifest.json"
FORMAT = 1
HASHED_AT_ONCE = min(8, os.cpu_count() or 1)
READ_WHEN_LOADING = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".index.json",
    "adapter_config.json",
)  # one more may change what is loaded


@dataclass(frozen=True)
class FileEntry:
    """A file as it was written."""

    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, and all of its files."""

    format: int
    kind: Literal["full", "weights"]
    """`full` can be resumed from; `weights` is the model alone."""
    step: int
    rows: int
    """Global rows trained on until then, those of skipped stretches included."""
    tokens: int
    world_size: int
    zero_stage: int | None
    """DeepSpeed's stage; None for plain runs and DDP."""
    exactness: str
    """How a resumed run compares with one that was never interrupted: `bit-exact`, or `elastic: ...` with the
    reason."""
    recipe: str
    """Hash of the recipe that ran."""
    data: str
    """Fingerprint of the data."""
    versions: dict[str, str]
    files: dict[str, FileEntry]
    """By their path from the checkpoint's folder; the manifest itself is not among them."""


@dataclass(frozen=True)
class CheckpointDamage:
    """One thing that is not as it was written."""

    file: str
    """Its path from the checkpoint's folder."""
    what: str
    """`missing`, `size`, `hash`, `unknown file`, `unreadable`, or for the manifest what is wrong with it."""
    details: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}{f' ({self.details})' if self.details else ''}"


def damages(folder: Path) -> list[CheckpointDamage]:
    """All that differs from the manifest; nothing of a sound checkpoint.

    Names and sizes come first, which cost nothing; only a checkpoint that passes them is read and hashed.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError as problem:
        return [CheckpointDamage(MANIFEST, "no sound manifest", str(problem))]
    return wrong_names_and_sizes(folder, manifest) or wrong_contents(folder, manifest.files)


def wrong_contents(folder: Path, files: Mapping[str, FileEntry]) -> list[CheckpointDamage]:
    """Which of these files hold other bytes than those that were written, several read at a time."""
    with ThreadPoolExecutor(HASHED_AT_ONCE) as pool:
        judged = pool.map(lambda name: wrong_content(folder, name, files[name]), files)
        return [damage for damage in judged if damage is not None]


def wrong_names_and_sizes(folder: Path, manifest: Manifest) -> list[CheckpointDamage]:
    """What a look at the folder tells, without reading a file."""
    found = []
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            found.append(CheckpointDamage(name, "missing"))
        elif (size := path.stat().st_size) != entry.size:
            found.append(CheckpointDamage(name, "size", f"{size:,} bytes instead of {entry.size:,}"))
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if (
            name not in manifest.files
            and name != MANIFEST
            and name.endswith(READ_WHEN_LOADING)
            and not path.name.startswith(".")
        ):
            found.append(CheckpointDamage(name, "unknown file", "it was not there when the checkpoint was written"))
    return found


def wrong_content(folder: Path, name: str, entry: FileEntry) -> CheckpointDamage | None:
    """Whether a file's bytes are others than those that were written."""
    try:
        found = hash_file(folder / name)
    except OSError as problem:
        return CheckpointDamage(name, "unreadable", str(problem.strerror))
    return None if found == entry else CheckpointDamage(name, "hash", f"{found.xxh3_128} instead of {entry.xxh3_128}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`, whole or not at all, so that it also survives a power cut; the files it names must be
    durable before."""
    beside = folder / f".{MANIFEST}.writing"
    beside.write_text(as_text(manifest))
    make_durable(beside)
    beside.replace(folder / MANIFEST)
    make_durable(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or not one byte for byte as it was written.
    """
    path = folder / MANIFEST
    try:
        text = path.read_text()
    except FileNotFoundError as problem:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it was not written to its end, or not by cpt."
        ) from problem
    except (OSError, UnicodeDecodeError) as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    try:
        content = json.loads(text)
        written_by = content["format"]
        if written_by == FORMAT:
            manifest = from_content(content)
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem!r}") from problem
    if written_by != FORMAT:
        raise CheckpointError(
            f"{path} is of format {written_by!r}, and this cpt reads {FORMAT}. Use the version of cpt that wrote it."
        )
    if as_text(manifest) != text:
        raise CheckpointError(f"{path} is damaged: it is not what its own hash says.")
    return manifest


def as_text(manifest: Manifest) -> str:
    """The file's content; its last line is the hash of all the others."""
    content = asdict(manifest)
    return json.dumps(content | {"xxh3_128": xxh3_128_hexdigest(json.dumps(content).encode())}, indent=1) + "\n"


def from_content(content: dict[str, Any]) -> Manifest:
    """What `as_text` wrote; every path stays inside the folder."""
    fields = {key: value for key, value in content.items() if key != "xxh3_128"}
    files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{name} is outside the checkpoint")
    return Manifest(files=files, **fields)


def hash_files(folder: Path, names: Iterable[str], threads: int = HASHED_AT_ONCE) -> dict[str, FileEntry]:
    """The entries of these files of the folder, hashed at the same time.

    Args:
        names: paths from the folder.
    """
    wanted = list(names)
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(wanted, pool.map(lambda name: hash_file(folder / name), wanted), strict=True))


def hash_file(path: Path) -> FileEntry:
    """Size and xxh3-128 of a file."""
    return FileEntry(*size_and_hash(path))


def make_durable(path: Path) -> None:
    """Wait until the disk has a file, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
