"""Save checkpoints: each is published whole or not at all, in the background if memory allows, and then archived.

Nothing is written between collective operations, so a disk that fails on one process keeps all processes in sync: all
of them abandon the save, and training continues.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import Any, Literal

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from cpt.checkpoints.manifest import MANIFEST, Manifest, write_manifest
from cpt.checkpoints.resume import published_checkpoints, step_of
from cpt.checkpoints.retention import (
    Archive,
    archive_record,
    copy_to_archive,
    local_archive,
    published_in,
    rotate,
)
from cpt.checkpoints.snapshot import (
    HostCopies,
    changed_by_steps,
    copy_beside_training,
    mark,
    memory_of,
    tensors_in,
)
from cpt.checkpoints.transaction import (
    Agreement,
    Contents,
    SaveFailed,
    clear_leftovers,
    hash_all,
    publish,
    read_back,
)
from cpt.distributed import is_main_process, num_nodes
from cpt.errors import CheckpointError, TrainingError
from cpt.formatting import format_bytes
from cpt.recipe.schema import Checkpoints
from cpt.runs.events import record_event

log = logging.getLogger("cpt")

Kind = Literal["full", "weights", "tasks"]  # tasks: weights to be evaluated and removed
PREFIXES: dict[Kind, str] = {"full": "checkpoint-", "weights": "weights-", "tasks": "tasks-"}
SECONDS_BEFORE_RETRIES = (2.0, 8.0)  # for the last save of a run, since no later one follows
MOST_OF_THE_MEMORY = 0.8  # copies may use this share of the free host memory
WRITTEN_LATER_TOO = (".md", ".html")  # the card, and the verdict's page


class Checkpointer:
    """Publishes the checkpoints of a run, and removes those that its rule does not keep.

    Forward and backward passes do not change a checkpoint's content, except buffers. A background save is thus copied
    while the next step runs, and training waits for the copies before the optimizer step.

    Every process must call its methods at the same point.

    Args:
        folder: of the run.
        settings: `checkpoints` of the recipe.
        device: of the training.
        timeout: for the processes to agree about a save.
        on_published: called on the main process with the folder and step of each full or weights checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        settings: Checkpoints,
        *,
        device: torch.device,
        timeout: timedelta,
        on_published: Callable[[Path, int], None] = lambda published, step: None,
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.device = device
        self.timeout = timeout
        self.on_published = on_published
        self.in_flight: Future[None] | None = None  # the save written in the background
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.host_copies = HostCopies()
        self.copied = Event()  # set unless copies are being made
        self.copied.set()
        self.copies_are_too_large = False
        self.kinds_read_back: set[Kind] = set()  # each process verifies one checkpoint of each kind
        self.save_failure: SaveFailed | None = None  # failure of the last save
        self.failed_saves = 0  # of full checkpoints, in a row

    @cached_property
    def agreement(self) -> Agreement:
        """Created at first use, by all processes."""
        return Agreement(self.timeout)

    @cached_property
    def archive(self) -> Archive | None:
        if self.settings.archive is None or not is_main_process():
            return None
        return Archive(self.folder, self.settings.archive)

    # --- when training begins and ends -------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save during training; no save is in flight when it ends or raises."""
        if is_main_process():
            names = clear_leftovers(self.folder)
            if names:
                log.info(
                    "%s: removed what a stopped run left unfinished: %s.",
                    self.folder,
                    ", ".join(names),
                )
        if self.archive is not None:
            complete = published_in(self.folder)
            self.archive.add_missing([checkpoint.folder for checkpoint in complete])
        self.agreement.gather(None)  # connects the processes while the launcher exists
        hook = register_optimizer_step_pre_hook(self.wait_for_copies)
        try:
            yield
        except BaseException:
            try:
                self.wait()
            except Exception as problem:  # raise the first error
                log.warning("The save in flight failed too: %s", problem)
            raise
        finally:
            hook.remove()
        self.wait()
        if self.archive is not None:
            self.archive.finish()

    def wait_for_copies(self, *_: Any) -> None:
        self.copied.wait()

    def wait(self) -> None:
        """Wait for the save in flight. Raises errors that would recur."""
        in_flight = self.in_flight
        self.in_flight = None
        if in_flight is not None:
            in_flight.result()

    @property
    def is_writing(self) -> bool:
        return self.in_flight is not None and not self.in_flight.done()

    @property
    def newest_step(self) -> int:
        """The step of the newest checkpoint; 0 without any."""
        return max(map(step_of, published_checkpoints(self.folder)), default=0)

    @property
    def must_succeed(self) -> bool:
        """Whether the next failed full save is one too many; call `wait` before, so that all failures are counted."""
        limit = self.settings.max_failed_saves
        return limit is not None and self.failed_saves + 1 >= limit

    # --- one save ----------------------------------------------------------------------------------------------------

    def save(self, contents: Contents, kind: Kind, *, spared: Collection[Path] = ()) -> None:
        """Publish a checkpoint, now or in the background; a failure is an event, and training continues.

        Args:
            contents: collected after `wait`.
            spared: checkpoints that must not be removed yet.
        """
        self.wait()
        if (
            self.settings.in_background
            and not contents.changes_at_any_time
            and self.detach(contents)
        ):
            moment = None if self.device.type == "cpu" else mark()
            copy = partial(self.copy_to_host, contents, moment)
            self.in_flight = self.writer.submit(
                self.write_out, contents, kind, spared=spared, copy=copy
            )
        else:
            self.write_out(contents, kind, spared=spared)

    def save_or_raise(self, contents: Contents, *, spared: Collection[Path] = ()) -> None:
        """Publish a full checkpoint now: with retries, or else in the archive.

        Raises:
            CheckpointError: it is not in the run's folder.
            TrainingError: the weights are not finite.
        """
        self.wait()
        self.write_out(contents, "full", spared=spared)
        for seconds in SECONDS_BEFORE_RETRIES:
            if self.save_failure is None or self.save_failure.reason != "storage":
                break
            time.sleep(seconds)
            self.write_out(contents, "full", spared=spared)
        failure = self.save_failure
        if failure is None:
            return
        step = contents.manifest.step
        if failure.reason == "not finite":
            raise TrainingError(could_not_be_saved(step, failure, self.describe_newest()))
        where = self.save_to_archive(contents)
        raise CheckpointError(could_not_be_saved(step, failure, where or self.describe_newest()))

    def write_out(
        self,
        contents: Contents,
        kind: Kind,
        *,
        spared: Collection[Path],
        copy: Callable[[], None] | None = None,
    ) -> None:
        """Publish, archive, and remove old checkpoints. Record a failure; if it would recur, end the run."""
        step = contents.manifest.step
        name = f"{PREFIXES[kind]}{step}"
        check = None
        if kind not in self.kinds_read_back:
            check = partial(read_back, model=contents.model)
        try:
            if copy is not None:
                self.agreement.together(copy)
            publish(self.folder, name, contents, self.agreement, read_back=check)
        except SaveFailed as failure:
            self.save_failure = failure
            if kind == "full":
                self.failed_saves += 1
            message = f"{name} was not saved: {failure}."
            self.record("save_failed", message, step=step, reason=failure.reason)
            if failure.reason == "error":
                raise
            return
        finally:
            self.host_copies.release()
        failure_before = self.save_failure
        self.save_failure = None
        if kind == "full":
            self.failed_saves = 0
        self.kinds_read_back.add(kind)
        if failure_before is not None:  # a full disk may have refused the failure's event
            message = f"{name} was saved; before it: {failure_before}."
            self.record("saved_again", message, step=step, reason=failure_before.reason)
        if kind != "tasks" and is_main_process():
            self.on_published(self.folder / name, step)
            self.archive_and_rotate(self.folder / name, kind, spared=spared)

    def archive_and_rotate(self, published: Path, kind: Kind, *, spared: Collection[Path]) -> None:
        in_use = set(spared)
        if self.archive is not None:
            if kind == "full":
                self.archive.add(published)
            in_use |= self.archive.in_use()
        try:
            rotate(self.folder, self.settings.kept, prefix=PREFIXES[kind], spared=in_use)
        except Exception as problem:  # disk or custom rule: must not end this process alone
            self.record(
                "not_removed",
                f"Old checkpoints could not be removed: {type(problem).__name__}: {problem}.",
            )

    def record(self, kind: str, message: str, **details: Any) -> None:
        if is_main_process():
            record_event(self.folder, kind, message, **details)

    def describe_newest(self) -> str:
        complete = published_in(self.folder)
        if not complete:
            return "No checkpoint exists."
        return f"The newest checkpoint is {complete[-1].folder}."

    def save_to_archive(self, contents: Contents) -> str:
        """Publish a full checkpoint in the archive instead; return how to use it, empty if this fails.

        If the archive is a URL, on one machine, its files are written to the folder for temporary files first.
        """
        archive = self.settings.archive
        if archive is None or (local_archive(archive) is None and num_nodes() > 1):
            return ""
        step = contents.manifest.step
        name = f"{PREFIXES['full']}{step}"
        root = local_archive(archive)
        try:
            if root is not None:
                publish(root / self.folder.name, name, contents, self.agreement)
            else:
                with temporary_folder(self.agreement) as folder:
                    publish(folder, name, contents, self.agreement)
                    self.agreement.on_main(
                        lambda: copy_to_archive(folder / name, self.folder, archive)
                    )
        except SaveFailed as failure:
            self.record(
                "archive_failed", f"{name} was not saved in {archive}: {failure}.", step=step
            )
            return ""
        archive_record(self.folder, archive)
        archived = f"{archive.rstrip('/')}/{self.folder.name}/{name}"
        return f"It is saved in the archive: copy {archived} to {self.folder}."

    # --- in the background -------------------------------------------------------------------------------------------

    def detach(self, contents: Contents) -> bool:
        """Copy what the next forward pass may change; return False without enough memory, so that training waits."""
        weights = contents.weights
        if contents.write_model is not None and weights is None:
            weights = contents.model.state_dict()
        changing = changed_by_steps(contents.model)
        changing_weights = []
        for tensor in tensors_in(weights):
            if memory_of(tensor) in changing:
                changing_weights.append(tensor)
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        needed_bytes = self.host_copies.missing([contents.states, changing_weights]) * processes
        free_bytes = psutil.virtual_memory().available
        if not all(self.agreement.gather(needed_bytes <= MOST_OF_THE_MEMORY * free_bytes)):
            if not self.copies_are_too_large:
                message = (
                    f"Copies for a save need {format_bytes(needed_bytes)} of free host memory: training waits for"
                    " saves."
                )
                self.record("saves_block", message, step=contents.manifest.step)
            self.copies_are_too_large = True
            return False
        buffers = set(map(memory_of, contents.model.buffers()))
        contents.states = self.copy_changing(contents.states, buffers)
        contents.weights = self.copy_changing(weights, buffers)
        self.copied.clear()
        return True

    def copy_to_host(self, contents: Contents, moment: torch.Event | None) -> None:
        """Copy the rest while training continues; the next optimizer step waits for it."""
        try:
            copy_beside_training(moment)
            contents.states = self.host_copies.copy(contents.states)
            contents.weights = self.copy_changing(
                contents.weights, changed_by_steps(contents.model)
            )
        finally:
            self.copied.set()

    def copy_changing(self, state: Any, memory: Collection[Any]) -> Any:
        """Copy the tensors of a state that are in this memory; the others remain."""
        return self.host_copies.copy(state, changing=lambda tensor: memory_of(tensor) in memory)


def could_not_be_saved(step: int, failure: SaveFailed, where: str) -> str:
    return (
        f"step {step} could not be saved ({failure}). {where} Fix this, then start the run again."
    )


@contextmanager
def temporary_folder(agreement: Agreement) -> Iterator[Path]:
    """A folder that the processes of one machine share."""
    folder = Path(agreement.on_main(tempfile.mkdtemp))
    try:
        yield folder
    finally:
        if is_main_process():
            shutil.rmtree(folder, ignore_errors=True)


def seal_export(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a complete export, so that `cpt verify RUN` covers it; for every process."""
    if not is_main_process():
        return
    files = {}
    for name, entry in hash_all(folder).items():
        if name != MANIFEST and not name.endswith(WRITTEN_LATER_TOO):
            files[name] = entry
    write_manifest(folder, replace(manifest, files=files))
