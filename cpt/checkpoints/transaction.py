"""Publish a checkpoint completely or not at all: write, hash and sync its files, write the manifest, then rename.

.saving/checkpoint-N   while it is written; a leftover is removed at the next start
checkpoint-N           complete, its manifest.json written last
.del-checkpoint-N      while it is removed
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from xxhash import xxh3_128

from cpt.checkpoints.manifest import (
    FileEntry,
    Manifest,
    damages,
    defects,
    hash_file,
    read_manifest,
    write_manifest,
)
from cpt.checkpoints.snapshot import NotFiniteError, bytes_in, saved_parameters
from cpt.distributed import is_main_process, rank, world_size
from cpt.errors import CheckpointError
from cpt.files import LEAVING, files_in, make_durable, rename_over
from cpt.formatting import MIB
from cpt.torch_internals import count_collectives, default_store

Weights = dict[str, torch.Tensor]
Task = Callable[[], dict[str, FileEntry]]
"""Writes files, and returns their entries."""
RESERVE = 16 * MIB  # for other files of the run and file system metadata
STAGING = ".saving"
SECONDS_FOR_FILES_TO_APPEAR = 60.0
SECONDS_FOR_THE_SAME_ERROR = 30.0  # on all processes: they are in the same step
FILES_AT_ONCE = 4  # one can be serialised while another waits for the disk
PIECE = 1 << 18
MODEL_PART = ".model"  # temporary folder for the model's files


@dataclass
class Contents:
    """The content of a checkpoint that one process writes, by path relative to its folder."""

    manifest: Manifest
    """Without its files."""
    model: nn.Module
    """Whose weights these are."""
    states: dict[str, Any] = field(default_factory=dict)
    """States to write by `torch.save`."""
    texts: dict[str, str] = field(default_factory=dict)
    write_model: Callable[[Path, Weights | None], None] | None = None
    """On the main process: writes the model's files into a folder, with these weights or else the current ones."""
    weights: Weights | None = None
    model_bytes: int = 0
    """Expected size of the model's files."""
    check: Callable[[Weights | None], None] | None = None
    """Raises if these weights must not be published."""
    changes_at_any_time: bool = False
    """Whether an engine updates the states during the next step, so that training must wait until they are written."""

    def num_bytes(self) -> int:
        """Approximate size."""
        return (
            bytes_in(self.states)
            + self.model_bytes
            + sum(len(text) for text in self.texts.values())
        )


def publish(
    folder: Path,
    name: str,
    contents: Contents,
    agreement: "Agreement",
    *,
    read_back: Callable[[Path], None] | None = None,
) -> Manifest:
    """Write checkpoint `name` into the run's folder; every process must call it, and all raise the same SaveFailed.

    Args:
        read_back: checks the folder before it is published, and raises if it is damaged.
    """
    staging = folder / STAGING / name
    needed = sum(agreement.gather(contents.num_bytes()))
    try:
        agreement.on_main(lambda: prepare(staging, needed))
        entries_by_process = agreement.together(lambda: write(contents, staging))
        files = {
            path: entry for entries in entries_by_process for path, entry in sorted(entries.items())
        }
        manifest = replace(contents.manifest, files=files)
        return agreement.on_main(lambda: finish(staging, folder / name, manifest, read_back))
    except SaveFailed:
        if is_main_process():
            shutil.rmtree(staging, ignore_errors=True)
            remove_if_empty(staging.parent)
        raise


def prepare(staging: Path, needed: int) -> None:
    """Create an empty folder; OSError if the disk has too little space."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    free = shutil.disk_usage(staging).free
    if free < needed + RESERVE:
        size = f"{needed / MIB:,.0f} MiB and the run's other files {RESERVE / MIB:.0f} MiB"
        raise OSError(f"the checkpoint needs {size}, but {staging} has {free / MIB:,.0f} MiB free")


def write(contents: Contents, staging: Path) -> dict[str, FileEntry]:
    if contents.check is not None:
        contents.check(contents.weights)
    files: dict[str, Any] = {**contents.states, **contents.texts}
    tasks = [
        entry_of(path, partial(write_state, staging / path, content))
        for path, content in files.items()
    ]
    write_files = contents.write_model
    if write_files is None:
        return all_at_once(tasks)

    def write_model() -> dict[str, FileEntry]:
        part = staging / MODEL_PART  # a separate folder shows the names of the model's files
        write_files(part, contents.weights)
        entries = hash_all(part)
        for path in list(part.iterdir()):
            path.rename(staging / path.name)
        part.rmdir()
        return entries

    return all_at_once([*tasks, write_model])


def entry_of(path: str, write_file: Callable[[], FileEntry]) -> Task:
    return lambda: {path: write_file()}


def hash_all(folder: Path) -> dict[str, FileEntry]:
    """Hash all files, and make them durable."""
    return all_at_once(
        [entry_of(name, partial(hash_durably, path)) for name, path in files_in(folder).items()]
    )


def finish(
    staging: Path, published: Path, manifest: Manifest, read_back: Callable[[Path], None] | None
) -> Manifest:
    """Write the manifest, make the folders durable, and publish with one rename."""
    give_up = (
        time.monotonic() + SECONDS_FOR_FILES_TO_APPEAR
    )  # written by other processes, on a network disk
    while absent := [name for name in manifest.files if not (staging / name).is_file()]:
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{absent[0]}, written by another process, is not in {staging}: `output_dir` must be on a disk shared"
                " by all machines."
            )
        time.sleep(0.1)
    for inside in [path for path in staging.rglob("*") if path.is_dir()]:
        make_durable(inside)
    write_manifest(staging, manifest)
    if read_back is not None:
        read_back(staging)
    rename_over(staging, published)  # the step may exist from before a roll-back
    remove_if_empty(staging.parent)
    return manifest


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what a killed run was writing or removing; returns the names."""
    leftovers = [*(folder / STAGING).glob("*"), *folder.glob(f"{LEAVING}*")]
    for path in leftovers:
        shutil.rmtree(path, ignore_errors=True)
    remove_if_empty(folder / STAGING)
    return sorted(path.name for path in leftovers)


# --- one file --------------------------------------------------------------------------------------------------------


class HashedFile(FileIO):
    """A file that is hashed while `torch.save` writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")
        self.digest = xxh3_128()
        self.problem: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write a buffer in pieces that fit into the processor's cache."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), PIECE):
                piece = view[start : start + PIECE]
                self.digest.update(piece)
                while len(piece):
                    piece = piece[super().write(piece) :]
        except (
            OSError
        ) as problem:  # torch.save would hide it behind a RuntimeError, "unexpected pos"
            problem.filename = str(self.name)
            self.problem = problem
            raise
        return len(view)

    def entry(self) -> FileEntry:
        """Size and hash, once the file is durable."""
        os.fsync(self.fileno())
        return FileEntry(self.tell(), self.digest.hexdigest())


def write_state(path: Path, content: Any) -> FileEntry:
    """Write a text, or save anything else by `torch.save`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        try:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                torch.save(content, file)
        except RuntimeError as problem:
            if file.problem is None:
                raise
            raise file.problem from problem
        return file.entry()


def hash_durably(path: Path) -> FileEntry:
    """The entry of an existing file, hashed while the disk writes it."""
    with ThreadPoolExecutor(1) as helper:
        durable = helper.submit(make_durable, path)
        entry = hash_file(path)
        durable.result()
    return entry


def all_at_once(tasks: Sequence[Task]) -> dict[str, FileEntry]:
    """Run several tasks in parallel; after a failure no further task starts."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return {path: entry for future in futures for path, entry in future.result().items()}
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


Result = TypeVar("Result")
Reason = Literal["storage", "not finite", "error"]


class SaveFailed(CheckpointError):  # noqa: N818  # describes an event
    """A checkpoint was not published; every process raises the same. `storage` (the disk is full, gone or read-only):
    a retry may succeed; `not finite`: the weights contain NaN or infinity."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class Agreement:
    """Run something on all processes or on none: a failure on one is raised on all.

    It uses a separate process group, so that a thread can use it while training uses the others.
    """

    def __init__(self, timeout: timedelta) -> None:
        has_others = dist.is_initialized() and dist.get_world_size() > 1
        self.group = dist.new_group(backend="gloo", timeout=timeout) if has_others else None

    def gather(self, mine: Result) -> list[Result]:
        if self.group is None:
            return [mine]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self.group)
        return everyone

    def after_error(self, position: tuple[int, ...]) -> str:
        """Whether all processes failed at the same point, so that they can save together; empty, or why they cannot.

        `position` counts steps. The number of collectives shows that none is half done: it would take the data of the
        save. A store is used because the others may wait in a collective for up to `training.ddp_timeout`.
        """
        if self.group is None:
            return ""
        store = default_store()
        point = repr((*position, *count_collectives()))
        keys = [f"cpt/failed/{number}" for number in range(world_size())]
        store.set(keys[rank()], point)
        try:
            store.wait(keys, timedelta(seconds=SECONDS_FOR_THE_SAME_ERROR))
        except dist.DistNetworkError:
            return "process 0 is gone"  # it has the store, if no launcher has it
        except dist.DistStoreError:
            missing_ranks = [
                str(number) for number, key in enumerate(keys) if not store.check([key])
            ]
            seconds = f"{SECONDS_FOR_THE_SAME_ERROR:.0f} s"
            return f"process {', '.join(missing_ranks)} did not fail within {seconds}, and may wait for it"
        if len({store.get(key) for key in keys}) > 1:
            return "the processes failed at different points of a step"
        return ""

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """The results of all processes by rank; SaveFailed on all if one fails."""
        result: Result | None = None
        cause: Exception | None = None
        failure: tuple[Reason, str] | None = None
        try:
            result = work()
        except Exception as problem:  # the other processes wait for a result
            prefix = f"process {rank()}: " if world_size() > 1 else ""
            cause = problem
            failure = (reason_of(problem), f"{prefix}{in_words(problem)}")
        answers = self.gather((result, failure))
        for _, failure in answers:
            if failure is not None:
                raise SaveFailed(*failure) from cause
        return [result for result, _ in answers]  # type: ignore[misc]

    def on_main(self, work: Callable[[], Result]) -> Result:
        """The main process's result on all processes; SaveFailed on all if it fails."""
        return self.together(lambda: work() if is_main_process() else None)[0]  # type: ignore[return-value]


def reason_of(problem: BaseException) -> Reason:
    if isinstance(problem, SaveFailed):
        return problem.reason
    if isinstance(problem, NotFiniteError):
        return "not finite"
    if (
        isinstance(problem, OSError)
        or isinstance(problem, SafetensorError)
        and "os error" in str(problem).lower()
    ):
        return "storage"
    return "error"


def in_words(problem: BaseException) -> str:
    if isinstance(problem, OSError) and problem.strerror:
        return f"{problem.strerror}{f' ({problem.filename})' if problem.filename else ''}"
    if isinstance(problem, CheckpointError | NotFiniteError | OSError):
        return str(problem)
    return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"


def read_back(folder: Path, model: nn.Module) -> None:
    """Read the first checkpoint of a run back from disk: compare it with its manifest, and count the weights.

    Raises SaveFailed if it is damaged (a retry may succeed), or if weights are missing.
    """
    for path in files_in(folder).values():
        with path.open("rb") as file:  # drop the page cache, so that the disk is read
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    manifest = read_manifest(folder)
    damages_found = damages(folder)
    if damages_found:
        raise SaveFailed(
            "storage",
            f"the disk returns other data than was written: {'; '.join(map(str, damages_found[:3]))}",
        )
    if manifest.kind == "full" and (damages_found := defects(folder)):
        raise SaveFailed(
            "error",
            f"a run cannot resume from this checkpoint: {'; '.join(map(str, damages_found[:3]))}",
        )
    stored = count_stored(folder)
    needed = sum(numbers for _, numbers in saved_parameters(model))
    if stored < needed:
        text = (
            f"the checkpoint has {stored:,} of {needed:,} weights: a model cannot be loaded from it"
        )
        raise SaveFailed("error", text)


def count_stored(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as opened:
            total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return total
