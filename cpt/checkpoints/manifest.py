"""The manifest of a checkpoint, `manifest.json`: each file with its size and hash, to verify the checkpoint."""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from cpt.errors import CheckpointError
from cpt.files import sealed, size_and_hash, unsealed, write_atomic
from cpt.runs.folder import EXPORT
from cpt.runs.folder import MANIFEST as MANIFEST

FORMAT = 1
WeightDecay = Literal["by role", "by dimension"]
BY_ROLE: WeightDecay = "by role"
BY_DIMENSION: WeightDecay = "by dimension"
FILES_AT_ONCE = min(8, os.cpu_count() or 1)
READ_WHEN_LOADING = (".safetensors", ".bin", ".pt", ".pth", ".index.json", "adapter_config.json")
FSDP_FOLDER = "fsdp"
FSDP_PART = re.compile(rf"{FSDP_FOLDER}/part_(\d+)_of_(\d+)\.pt")
PUBLISHED = re.compile(r"(checkpoint|weights)-(\d+)")
STATE = "trainer_state.json"
TRAINING_POINT = "training_point.pt"  # weights of an optimizer that evaluates at other ones
POSITION = "data_position.json"
OF_THE_RUN = (
    "optimizer.pt",
    TRAINING_POINT,
    "scheduler.pt",
    "rng_state",
    f"{FSDP_FOLDER}/",
)  # files for resuming only


@dataclass(frozen=True)
class FileEntry:
    size: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    format: int
    kind: Literal["full", "weights"]
    """`full`: a run can resume from it; `weights`: only the model."""
    step: int
    tokens: int
    world_size: int
    zero_stage: int | None
    """DeepSpeed's ZeRO stage; None for plain runs and DDP."""
    exactness: str
    """How resuming compares with an uninterrupted run: `bit-exact`, or `elastic: ...` with the reason."""
    versions: dict[str, str]
    files: dict[str, FileEntry]
    """Path relative to the checkpoint's folder -> entry; without the manifest."""
    weight_decay: WeightDecay = BY_DIMENSION
    """By what a parameter has it, see `cpt.optim.groups`; manifests of earlier versions do not say."""


@dataclass(frozen=True)
class CheckpointDamage:
    file: str
    """Path relative to the checkpoint's folder."""
    what: str
    """`missing`, `size`, `hash`, `unknown file`, `unreadable`, or the problem with the manifest."""
    details: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.what}{f' ({self.details})' if self.details else ''}"


def damages(folder: Path) -> list[CheckpointDamage]:
    """All differences from the manifest. Files are read only if all names and sizes are correct."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as problem:
        return [CheckpointDamage(MANIFEST, "no valid manifest", str(problem))]
    return wrong_names_and_sizes(folder, manifest) or wrong_contents(folder, manifest.files)


def wrong_names_and_sizes(folder: Path, manifest: Manifest) -> list[CheckpointDamage]:
    damages_found = []
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            damages_found.append(CheckpointDamage(name, "missing"))
        elif (size := path.stat().st_size) != entry.size:
            damages_found.append(
                CheckpointDamage(name, "size", f"{size:,} bytes instead of {entry.size:,}")
            )
    for path in sorted(folder.rglob("*")):  # an extra weight file may change what is loaded
        name = path.relative_to(folder).as_posix()
        if (
            name not in manifest.files
            and name.endswith(READ_WHEN_LOADING)
            and not path.name.startswith(".")
        ):
            damages_found.append(
                CheckpointDamage(name, "unknown file", "it is not in the manifest")
            )
    return damages_found


def wrong_contents(folder: Path, files: Mapping[str, FileEntry]) -> list[CheckpointDamage]:
    """Files whose content has changed; several are read in parallel."""

    def damage_of(name: str) -> CheckpointDamage | None:
        try:
            entry_now = hash_file(folder / name)
            entry = files[name]
        except OSError as problem:
            return CheckpointDamage(name, "unreadable", str(problem.strerror))
        details = f"{entry_now.xxh3_128} instead of {entry.xxh3_128}"
        if entry_now == entry:
            return None
        return CheckpointDamage(name, "hash", details)

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        return [damage for damage in pool.map(damage_of, files) if damage is not None]


def hash_file(path: Path) -> FileEntry:
    return FileEntry(*size_and_hash(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` atomically and durably; the files that it lists must be durable already."""
    write_atomic(folder / MANIFEST, sealed(asdict(manifest), indent=1) + "\n", durable=True)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest; CheckpointError if it is missing, damaged, of another format, or names a file outside."""
    path = folder / MANIFEST
    try:
        content = unsealed(path.read_bytes())
        if content["format"] == FORMAT:
            outside = []
            for name in content["files"]:
                if name.startswith("/") or ".." in Path(name).parts:
                    outside.append(name)
            if outside:
                raise ValueError(f"{outside[0]} is outside the checkpoint")
            files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
            return Manifest(**{**content, "files": files})
    except FileNotFoundError as problem:
        raise CheckpointError(
            f"{folder} lacks {MANIFEST}: its save did not finish, or it is not cpt's."
        ) from problem
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem}") from problem
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
        raise CheckpointError(f"{path} is damaged: {problem!r}") from problem
    raise CheckpointError(
        f"{path} has format {content['format']!r}, but this cpt reads {FORMAT}. Use the version of cpt that wrote it."
    )


def defects(checkpoint: Path) -> list[CheckpointDamage]:
    """The reasons why a run cannot resume from this checkpoint; empty if it can."""
    damages_found = damages(checkpoint)
    if damages_found:
        return damages_found
    manifest = read_manifest(checkpoint)
    if manifest.kind != "full":
        return [
            CheckpointDamage(
                MANIFEST, "weights alone", "a run can only resume from a full checkpoint"
            )
        ]
    lacking = lacking_state(manifest.files, manifest.world_size)
    damages_found = [CheckpointDamage(name, "missing", "it was never written") for name in lacking]
    if (
        not damages_found
        and json.loads((checkpoint / STATE).read_text())["global_step"] != manifest.step
    ):
        damages_found = [
            CheckpointDamage(STATE, "another step", f"the manifest says {manifest.step}")
        ]
    return damages_found


def lacking_state(names: Collection[str], world_size: int | None = None) -> list[str]:
    """The state files needed to resume that are not in `names`, the relative paths of a checkpoint's files."""
    lacking = [name for name in (STATE, "scheduler.pt") if name not in names]
    if not any(name.startswith("rng_state") for name in names):
        lacking.append("rng_state.pth")
    if world_size is not None and world_size > 1:
        for rank in range(world_size):
            name = f"rng_state_{rank}.pth"
            if name not in names:
                lacking.append(name)
    of_zero = [name for name in names if name.endswith("optim_states.pt")]
    of_fsdp = parts_in(names)
    if of_fsdp and world_size is not None:
        for rank in range(world_size):
            name = file_of_part(rank, world_size)
            if name not in of_fsdp:
                lacking.append(name)
    # `latest` is written by DeepSpeed, and names the folder of its states
    if "latest" not in names and "optimizer.pt" not in names and not of_fsdp:
        lacking.append("optimizer.pt")
    if "latest" in names and world_size is not None and len(of_zero) < world_size:
        lacking.append(f"{world_size - len(of_zero)} of {world_size} *_optim_states.pt")
    return lacking


def refuse_changed_weights(checkpoint: Path) -> None:
    """Raise CheckpointError before a model is built from damaged weights of a checkpoint with a manifest."""
    if not (checkpoint / MANIFEST).exists():
        return
    manifest = read_manifest(checkpoint)
    read = {}
    for name, entry in manifest.files.items():
        if not name.startswith(OF_THE_RUN):
            read[name] = entry
    damages_found = wrong_contents(checkpoint, read)
    if damages_found:
        listing = "\n".join(f"  {damage}" for damage in damages_found)
        raise CheckpointError(
            f"{checkpoint} differs from what was written:\n{listing}\nChoose another checkpoint; `cpt verify`"
            " lists the intact ones."
        )


@dataclass(frozen=True)
class Verified:
    folder: Path
    step: int | None
    num_bytes: int
    found: list[CheckpointDamage]


def verify_path(path: Path) -> list[Verified]:
    """Verify a checkpoint, or all checkpoints of a run, by step; CheckpointError if there are none."""
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such folder (from {Path.cwd()}). Give a run's folder or a checkpoint."
        )
    if (path / MANIFEST).exists() or PUBLISHED.fullmatch(path.name):
        return [verify_folder(path)]
    published = []
    for folder in path.iterdir():
        match = PUBLISHED.fullmatch(folder.name)
        is_published = match or folder.name == EXPORT or (folder / MANIFEST).exists()
        if is_published and folder.is_dir() and not folder.name.startswith((".", "bad-")):
            published.append(
                (match[1], int(match[2]), folder) if match else (folder.name, 0, folder)
            )
    if not published:
        raise CheckpointError(
            f"{path} has neither checkpoints nor {MANIFEST}. Give a checkpoint, or a run with some."
        )
    verified = [verify_folder(folder) for *_, folder in sorted(published)]
    # A run in progress may have removed some.
    return [checkpoint for checkpoint in verified if checkpoint.folder.is_dir()]


def verify_folder(folder: Path) -> Verified:
    try:
        manifest = read_manifest(folder)
    except CheckpointError:
        return Verified(folder, None, 0, damages(folder))
    damages_found = defects(folder) if manifest.kind == "full" else damages(folder)
    return Verified(
        folder, manifest.step, sum(entry.size for entry in manifest.files.values()), damages_found
    )


def file_of_part(rank: int, processes: int) -> str:
    return f"{FSDP_FOLDER}/part_{rank}_of_{processes}.pt"


def parts_in(names: Iterable[str]) -> list[str]:
    return [name for name in names if FSDP_PART.fullmatch(name)]
