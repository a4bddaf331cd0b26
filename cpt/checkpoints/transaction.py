"""A checkpoint is published whole or not at all: written beside, hashed, on the disk, named in a manifest, then
renamed.

.saving/checkpoint-N   while it is written; a kill leaves it there, and the next start removes it
checkpoint-N           all of it, its manifest.json written last
.del-checkpoint-N      on its way out
"""

import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cpt.checkpoints.agreement import Agreement, SaveFailed
from cpt.checkpoints.manifest import FileEntry, Manifest, make_durable, write_manifest
from cpt.checkpoints.snapshot import bytes_in
from cpt.checkpoints.writing import Task, all_at_once, hash_durably, write_state, write_text
from cpt.checkpoints.zero_parts import ZeroParts
from cpt.errors import CheckpointError
from cpt.ranks import is_main_process

Weights = dict[str, torch.Tensor]
MIB = 2**20
RESERVE = 16 * MIB  # for what else the run writes, and for the file system's own tables
STAGING, LEAVING = ".saving", ".del-"
SECONDS_FOR_FILES_TO_APPEAR = 60.0
MODEL_PART = ".model"  # in the staging folder: the model's files, before they move to the others


@dataclass
class Contents:
    """What one process puts into a checkpoint; the main process puts the model in too."""

    states: dict[str, Any] = field(default_factory=dict)
    """Path from the checkpoint's folder -> what `torch.save` writes there."""
    texts: dict[str, str] = field(default_factory=dict)
    """Path -> text."""
    copies: dict[str, Path] = field(default_factory=dict)
    """Path -> file or folder that is copied there."""
    write_model: Callable[[Path, Weights | None], None] | None = None
    """Writes the model's files into a folder, with these weights; with None: those it has now."""
    weights: Weights | None = None
    """What it is given."""
    gather: Callable[[], Weights | None] | None = None
    """Gets these weights from all processes, each of which must call it; called while other files are being
    written."""
    parts: ZeroParts | None = None
    """What of this process it reads, where the next step may change that."""
    model_bytes: int = 0
    """What these files will take."""
    check: Callable[[Weights | None], None] | None = None
    """Raises where these weights should not be published."""

    def num_bytes(self) -> int:
        """What this process will write, nearly."""
        return bytes_in(self.states) + self.model_bytes + sum(len(text) for text in self.texts.values())


def publish(
    folder: Path,
    name: str,
    contents: Contents,
    describe: Callable[[dict[str, FileEntry]], Manifest],
    agreement: Agreement,
    *,
    read_back: Callable[[Path], None] | None = None,
) -> Manifest:
    """Write `name` into the run's folder; every process must call it, and hears of the failure of any.

    Args:
        describe: makes the manifest out of the entries of all files; called on the main process.
        read_back: looks at the written folder before it is published; raises where it is not good.

    Raises:
        SaveFailed: nothing was published, and nothing that was there is lost.
    """
    staging = folder / STAGING / name
    needed = sum(agreement.gather(contents.num_bytes()))
    try:
        agreement.on_main(lambda: prepare(staging, needed))
        written = agreement.together(lambda: write(contents, staging))
        files = {path: entry for entries in written for path, entry in sorted(entries.items())}
        return agreement.on_main(lambda: finish(staging, folder / name, describe(files), read_back))
    except SaveFailed:
        if is_main_process():
            shutil.rmtree(staging, ignore_errors=True)
            remove_if_empty(staging.parent)
        raise


def prepare(staging: Path, needed: int) -> None:
    """An empty folder on a disk with room."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    refuse_small_disk(staging, needed)


def write(contents: Contents, staging: Path) -> dict[str, FileEntry]:
    """Write what this process has; when it returns, the disk has it."""
    tasks = [
        partial(entry_of, path, partial(write_state, staging / path, state)) for path, state in contents.states.items()
    ]
    tasks += [
        partial(entry_of, path, partial(write_text, staging / path, text)) for path, text in contents.texts.items()
    ]
    tasks += [partial(copy_durably, source, staging, path) for path, source in contents.copies.items()]
    return all_at_once(tasks, meanwhile=partial(model_tasks, contents, staging))


def model_tasks(contents: Contents, staging: Path) -> list[Task]:
    """What writes the model's files, once its weights are there and found good; the first, all processes do
    together."""
    if contents.gather is not None:
        contents.weights = contents.gather()
    if contents.check is not None:
        contents.check(contents.weights)
    if contents.write_model is None:
        return []
    return [partial(write_model, partial(contents.write_model, staging / MODEL_PART, contents.weights), staging)]


def entry_of(path: str, write_file: Callable[[], FileEntry]) -> dict[str, FileEntry]:
    """One file's entry under its path."""
    return {path: write_file()}


def write_model(write_files: Callable[[], None], staging: Path) -> dict[str, FileEntry]:
    """The model's files, in a folder of their own until they are known by name."""
    part = staging / MODEL_PART
    write_files()
    entries = hash_all(part)
    for path in list(part.iterdir()):
        path.rename(staging / path.name)
    part.rmdir()
    return entries


def copy_durably(source: Path, staging: Path, path: str) -> dict[str, FileEntry]:
    """A copy of a file or a folder."""
    target = staging / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target)
        return {f"{path}/{name}": entry for name, entry in hash_all(target).items()}
    shutil.copy(source, target)
    return {path: hash_durably(target)}


def hash_all(folder: Path) -> dict[str, FileEntry]:
    """The entries of all files below, once the disk has them."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return all_at_once(
        [partial(entry_of, path.relative_to(folder).as_posix(), partial(hash_durably, path)) for path in files]
    )


def finish(staging: Path, published: Path, manifest: Manifest, read_back: Callable[[Path], None] | None) -> Manifest:
    """Manifest, folders to the disk, and the one rename that publishes."""
    await_files(staging, manifest)
    for inside in [path for path in staging.rglob("*") if path.is_dir()]:
        make_durable(inside)
    write_manifest(staging, manifest)
    if read_back is not None:
        read_back(staging)
    leaving = published.with_name(f"{LEAVING}{published.name}")
    if published.exists():  # the same step once more, after going back to an earlier one
        shutil.rmtree(leaving, ignore_errors=True)
        published.rename(leaving)
    staging.rename(published)
    make_durable(published.parent)
    shutil.rmtree(leaving, ignore_errors=True)
    remove_if_empty(staging.parent)
    return manifest


def remove_if_empty(folder: Path) -> None:
    """Leave no trace of saving."""
    with suppress(OSError):
        folder.rmdir()


def await_files(staging: Path, manifest: Manifest) -> None:
    """See what the other processes wrote; on a disk of the network it may take a moment."""
    give_up = time.monotonic() + SECONDS_FOR_FILES_TO_APPEAR
    while absent := [name for name in manifest.files if not (staging / name).is_file()]:
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{absent[0]}, which another process wrote, is not in {staging}: `output_dir` must be on a disk that"
                " all machines share."
            )
        time.sleep(0.1)


def remove(published: Path) -> None:
    """Take a checkpoint away, so that no half of it can be taken for one."""
    leaving = published.with_name(f"{LEAVING}{published.name}")
    shutil.rmtree(leaving, ignore_errors=True)
    published.rename(leaving)
    shutil.rmtree(leaving)


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what a killed run was writing or removing; the names of what was there."""
    leftovers = [*(folder / STAGING).glob("*"), *folder.glob(f"{LEAVING}*")]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    remove_if_empty(folder / STAGING)
    return sorted(path.name for path in leftovers)


def refuse_small_disk(folder: Path, needed: int) -> None:
    """See that the folder's disk has room.

    Raises:
        OSError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + RESERVE:
        room = f"{needed / MIB:,.0f} MiB and {RESERVE / MIB:.0f} MiB for what else the run writes"
        raise OSError(f"the checkpoint takes {room}, and {folder} has {free / MIB:,.0f} MiB free")
