"""Save a run as transactions: all processes take a snapshot together, then each writes, then one rename publishes.

Nothing is written between collective operations, so a disk that fails on one process keeps all processes in sync: all
of them abandon the save, and training continues.
"""

import dataclasses
import json
import logging
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import psutil
import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from peft import PeftModel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer
from transformers.trainer_callback import ExportableState
from transformers.training_args import ParallelMode

from cpt.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    TRAINING_POINT,
    FileEntry,
    Manifest,
    file_of_part,
    write_manifest,
)
from cpt.checkpoints.resume import published_checkpoints, step_of
from cpt.checkpoints.retention import (
    Archive,
    archive_record,
    copy_to_archive,
    local_archive,
    published_in,
    rotate,
)
from cpt.checkpoints.sharding import (
    LATEST,
    capture_states,
    full_weights,
    part_here,
    scripts_of_deepspeed,
)
from cpt.checkpoints.snapshot import (
    HostCopies,
    changed_by_steps,
    copy_beside_training,
    mark,
    memory_of,
    refuse_non_finite,
    saved_parameters,
    tensors_in,
)
from cpt.checkpoints.transaction import (
    Agreement,
    Contents,
    SaveFailed,
    Weights,
    clear_leftovers,
    hash_all,
    publish,
    read_back,
)
from cpt.deepspeed_internals import gather_zero3_weights
from cpt.distributed import is_main_process, num_nodes
from cpt.errors import CheckpointError, TrainingError
from cpt.evaluation.scoring import StopEarly
from cpt.files import make_durable
from cpt.formatting import format_bytes
from cpt.optim.evaluation_point import (
    copy_of_weights,
    evaluation_point,
    has_evaluation_point,
    training_point,
)
from cpt.runs.events import record_event
from cpt.runs.folder import RECORD
from cpt.runs.history import copy_of_record
from cpt.runs.record import installed_version
from cpt.training.resuming import DataPosition
from cpt.training.tasks import PREFIX as TASKS_PREFIX

if TYPE_CHECKING:
    from cpt.training.trainer import CPTTrainer

log = logging.getLogger("cpt")

Kind = Literal["full", "weights", "tasks"]  # tasks: weights to be evaluated and removed
PREFIXES: dict[Kind, str] = {"full": "checkpoint-", "weights": "weights-", "tasks": TASKS_PREFIX}
SECONDS_BEFORE_RETRIES = (2.0, 8.0)  # for the last save of a run, since no later one follows
MOST_OF_THE_MEMORY = 0.8  # copies may use this share of the free host memory
PACKAGES = ("cpt", "torch", "transformers", "accelerate", "deepspeed", "peft", "safetensors")
WRITTEN_LATER_TOO = (".md", ".html")  # the card, and the verdict's page


class Checkpointer:
    """The Trainer's saving, as transactions; `recipe.checkpoints` sets the interval, the number to keep, and whether
    training waits.

    Forward and backward passes do not change a checkpoint's content, except buffers. A background save is thus copied
    while the next step runs, and training waits for the copies before the optimizer step.
    """

    def __init__(self, trainer: "CPTTrainer") -> None:
        self.trainer = trainer
        self.snapshot: Contents | None = (
            None  # during a snapshot: collects what the Trainer would write
        )
        self.in_flight: Future[None] | None = None  # the save written in the background
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="save")
        self.host_copies = HostCopies()
        self.copied = Event()  # set unless copies are being made
        self.copied.set()
        self.copies_are_too_large = False
        self.kinds_read_back: set[Kind] = set()  # each process verifies one checkpoint of each kind
        self.save_failure: SaveFailed | None = None  # failure of the last save
        self.failed_saves = 0  # of full checkpoints, in a row
        self.best: set[Path] = (
            set()
        )  # the best checkpoint of `evaluation.stop`, which is not removed

    @cached_property
    def agreement(self) -> Agreement:
        """Created at first use, by all processes."""
        return Agreement(self.trainer.args.ddp_timeout_delta)

    def wait_for_copies(self, *_: Any) -> None:
        self.copied.wait()

    @cached_property
    def archive(self) -> Archive | None:
        place = self.trainer.recipe.checkpoints.archive
        return (
            Archive(self.trainer.run_folder, place)
            if place is not None and self.trainer.args.should_save
            else None
        )

    # --- when to save ------------------------------------------------------------------------------------------------

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Save during training; no save is in flight when it ends or raises."""
        folder = self.trainer.run_folder
        if self.trainer.args.should_save and (names := clear_leftovers(folder)):
            log.info(
                "%s: removed what a stopped run left unfinished: %s.", folder, ", ".join(names)
            )
        if self.archive is not None:
            self.archive.add_missing([checkpoint.folder for checkpoint in published_in(folder)])
        self.agreement.gather(None)  # connects the processes while the launcher exists
        hook = register_optimizer_step_pre_hook(self.wait_for_copies)
        try:
            yield
        except BaseException:
            try:
                self.wait_for_saves()
            except Exception as problem:  # raise the first error
                log.warning("The save in flight failed too: %s", problem)
            raise
        finally:
            hook.remove()
        self.wait_for_saves()
        if self.archive is not None:
            self.archive.finish()

    def wait_for_saves(self) -> None:
        """Wait for the save in flight; all processes must call it. Raises errors that would recur."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is not None:
            in_flight.result()

    @property
    def is_unsaved(self) -> bool:
        newest = max(map(step_of, published_checkpoints(self.trainer.run_folder)), default=0)
        return bool(self.trainer.state.global_step > newest)

    @property
    def weights_due(self) -> Kind | None:
        """The kind to save after this step, unless a full checkpoint is saved."""
        every, step = (
            self.trainer.recipe.checkpoints.weights_every_steps,
            self.trainer.state.global_step,
        )
        if every is not None and step % every == 0:
            return "weights"
        return "tasks" if self.trainer.tasks.is_due(step) else None

    @property
    def is_writing(self) -> bool:
        return self.in_flight is not None and not self.in_flight.done()

    def save(self) -> None:
        """Publish `checkpoint-N`. The last save of a run is retried, and must succeed; so must one that follows
        `checkpoints.max_failed_saves - 1` failed ones."""
        trainer, state = self.trainer, self.trainer.state
        trainer.store_flos()
        self.wait_for_saves()  # from here on, all processes have counted the same failures
        limit = trainer.recipe.checkpoints.max_failed_saves
        is_last = trainer.control.should_training_stop or state.global_step >= state.max_steps
        must_succeed = is_last or (limit is not None and self.failed_saves + 1 >= limit)
        self.save_once("full")
        if not must_succeed:
            return
        self.wait_for_saves()
        for seconds in SECONDS_BEFORE_RETRIES:
            if self.save_failure is None or self.save_failure.reason != "storage":
                break
            time.sleep(seconds)
            self.save_once("full")
            self.wait_for_saves()
        if self.save_failure is None:
            return
        is_finite = self.save_failure.reason != "not finite"
        archived = self.save_to_archive() if is_finite else None
        where = self.newest_checkpoint()
        if archived is not None:
            where = f"It is saved in the archive: copy {archived} to {trainer.run_folder}."
        kind = CheckpointError if is_finite else TrainingError
        raise kind(
            f"step {state.global_step} could not be saved ({self.save_failure}). {where} Fix this, then start"
            " the run again."
        )

    def newest_checkpoint(self) -> str:
        if newest := published_in(self.trainer.run_folder)[-1:]:
            return f"The newest checkpoint is {newest[0].folder}."
        return "No checkpoint exists."

    def save_to_archive(self) -> str | None:
        """Publish this step in the archive instead; return where, None if this fails.

        If the archive is a URL, on one machine, its files are written to the folder for temporary files first.
        """
        run, step = self.trainer.run_folder, self.trainer.state.global_step
        place = self.trainer.recipe.checkpoints.archive
        if place is None or (local_archive(place) is None and num_nodes() > 1):
            return None
        name = f"{PREFIXES['full']}{step}"
        describe = partial(self.describe, "full", step)
        contents = self.take_snapshot(full=True)
        root = local_archive(place)
        try:
            if root is not None:
                publish(root / run.name, name, contents, describe, self.agreement)
            else:
                with temporary_folder(self.agreement) as folder:
                    publish(folder, name, contents, describe, self.agreement)
                    self.agreement.on_main(lambda: copy_to_archive(folder / name, run, place))
        except SaveFailed as failure:
            self.record("archive_failed", f"{name} was not saved in {place}: {failure}.", step=step)
            return None
        archive_record(run, place)
        return f"{place.rstrip('/')}/{run.name}/{name}"

    def save_last_step(self) -> str:
        """After an error save the last finished step; return why that is impossible, empty if it is saved.

        Within a step its weights are still there until the update begins. Several processes save only after an error
        at the same point of all: otherwise the others wait in a collective.
        """
        trainer, step = self.trainer, self.trainer.state.global_step
        if not self.is_unsaved:
            return ""
        if trainer.is_mid_update:
            return f"the update of step {trainer.begun_step} had begun"
        try:
            disagreement = self.agreement.after_error((step, trainer.begun_step))
            if disagreement:
                return disagreement
            drawn_after, states = trainer.random_states_before
            if drawn_after == step:  # the unfinished step may have drawn random numbers
                set_random_states(trainer, states)
            self.save_once("full")
            self.wait_for_saves()
        except (
            Exception
        ) as problem:  # a full disk, or a GPU after an error: report the first problem
            return str(problem)
        return "" if self.save_failure is None else str(self.save_failure)

    # --- one save ----------------------------------------------------------------------------------------------------

    def save_once(self, kind: Kind) -> None:
        """Take a snapshot of this step, and write it now or in the background."""
        self.wait_for_saves()
        self.best = {
            callback.best_checkpoint
            for callback in self.trainer.callback_handler.callbacks
            if isinstance(callback, StopEarly)
        }
        step = self.trainer.state.global_step
        changes = self.trainer.engine.updates_at_any_time
        contents = self.take_snapshot(full=kind == "full")
        if self.trainer.recipe.checkpoints.in_background and not changes and self.detach(contents):
            moment = mark() if self.trainer.args.device.type != "cpu" else None
            copy = partial(self.copy_to_host, contents, moment)
            self.in_flight = self.writer.submit(self.write_out, kind, step, contents, copy)
        else:
            self.write_out(kind, step, contents)
            self.wait_for_saves()

    def write_out(
        self, kind: Kind, step: int, contents: Contents, copy: Callable[[], None] | None = None
    ) -> None:
        """Publish, archive, and remove old checkpoints. Record a failure; if it would recur, end the run."""
        name = f"{PREFIXES[kind]}{step}"
        published = self.trainer.run_folder / name
        check = (
            None if kind in self.kinds_read_back else partial(read_back, model=self.trainer.model)
        )
        try:
            if copy is not None:
                self.agreement.together(copy)
            describe = partial(self.describe, kind, step)
            publish(
                self.trainer.run_folder, name, contents, describe, self.agreement, read_back=check
            )
        except SaveFailed as failure:
            self.save_failure = failure
            if kind == "full":
                self.failed_saves += 1
            self.record(
                "save_failed", f"{name} was not saved: {failure}.", step=step, reason=failure.reason
            )
            if failure.reason == "error":
                raise
            return
        finally:
            self.host_copies.release()
        before, self.save_failure = self.save_failure, None
        if kind == "full":
            self.failed_saves = 0
        self.kinds_read_back.add(kind)
        if before is not None:  # a full disk may have refused the failure's event
            self.record(
                "saved_again",
                f"{name} was saved; before it: {before}.",
                step=step,
                reason=before.reason,
            )
        if not self.trainer.args.should_save or kind == "tasks":
            return
        self.trainer.tasks.link(published, step)
        if self.archive is not None and kind == "full":
            self.archive.add(published)
        spared = self.archive.in_use() if self.archive is not None else set()
        try:
            rotate(
                self.trainer.run_folder,
                self.trainer.recipe.checkpoints.kept,
                prefix=PREFIXES[kind],
                spared=spared | self.best,
            )
        except Exception as problem:  # disk or custom rule: must not end this process alone
            self.record(
                "not_removed",
                f"Old checkpoints could not be removed: {type(problem).__name__}: {problem}.",
            )

    def record(self, kind: str, message: str, **details: Any) -> None:
        if self.trainer.args.should_save:
            record_event(self.trainer.run_folder, kind, message, **details)

    def describe(self, kind: Kind, step: int, files: dict[str, FileEntry]) -> Manifest:
        zero = self.trainer.engine.zero_section
        loader = self.trainer.checkpoint_loader
        return Manifest(
            format=FORMAT,
            kind="full" if kind == "full" else "weights",
            step=step,
            tokens=step * self.trainer.length.tokens_per_step,
            world_size=self.trainer.args.world_size,
            zero_stage=None if zero is None else int(zero.get("stage", 0)),
            exactness=loader.exactness,
            versions={name: found for name in PACKAGES if (found := installed_version(name))},
            files=files,
            weight_decay=loader.weight_decay,
        )

    # --- the snapshot ------------------------------------------------------------------------------------------------

    def take_snapshot(self, *, full: bool) -> Contents:
        """Return this process's part of the checkpoint; all collective operations of a save happen here."""
        trainer, taken = self.trainer, Contents()
        self.snapshot = taken
        nowhere = str(trainer.run_folder / f"step-{trainer.state.global_step}")
        of_adapter = isinstance(trainer.model, PeftModel)
        trainer.engine.reshard()
        try:
            weights: Weights | None = None  # the model's own, complete on each process
            if (trainer.engine.zero_section or {}).get("stage") == 3:
                weights = gather_zero3_weights(trainer.model_wrapped, only_trained=of_adapter)
            elif trainer.is_fsdp_enabled:
                weights = full_weights(trainer.model, only_trained=of_adapter)
            with evaluation_point(trainer.optimizer) as is_moved:
                if is_moved:
                    weights = copy_of_weights(trainer.model, only_trained=of_adapter)
                trainer.save_files(nowhere, weights)
            if full:
                self.take_states(taken, nowhere)
                taken.states[random_states_file(trainer)] = random_states(trainer)
                taken.states |= trainer.stage_states()
            if full and trainer.args.should_save:
                taken.texts |= {"trainer_state.json": progress(trainer), **trainer.guard.texts()}
                taken.texts[RECORD] = copy_of_record(trainer.run_folder)
                for callback in trainer.callback_handler.callbacks:
                    if isinstance(callback, DataPosition):
                        taken.texts |= callback.texts(
                            trainer.rows_of_steps.first(trainer.state.global_step)
                        )
        finally:
            self.snapshot = None
        return taken

    def detach(self, taken: Contents) -> bool:
        """Copy what the next forward pass may change; return False without enough memory, so that training waits."""
        weights = taken.weights
        if taken.write_model is not None and weights is None:
            weights = self.trainer.model.state_dict()
        changing = changed_by_steps(self.trainer.model)
        copied = [
            taken.states,
            [tensor for tensor in tensors_in(weights) if memory_of(tensor) in changing],
        ]
        needed = self.host_copies.missing(copied) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if not all(
            self.agreement.gather(needed <= MOST_OF_THE_MEMORY * psutil.virtual_memory().available)
        ):
            if not self.copies_are_too_large:
                size = format_bytes(needed)
                message = (
                    f"Copies for a save need {size} of free host memory: training waits for saves."
                )
                self.record("saves_block", message, step=self.trainer.state.global_step)
            self.copies_are_too_large = True
            return False
        memory_of_buffers = {memory_of(buffer) for buffer in self.trainer.model.buffers()}
        copy = partial(
            self.host_copies.copy, changing=lambda tensor: memory_of(tensor) in memory_of_buffers
        )
        taken.states, taken.weights = copy(taken.states), copy(weights)
        self.copied.clear()
        return True

    def copy_to_host(self, taken: Contents, moment: torch.Event | None) -> None:
        """Copy the rest while training continues; the next optimizer step waits for it."""
        try:
            copy_beside_training(moment)
            changing = changed_by_steps(self.trainer.model)
            copy = partial(
                self.host_copies.copy, changing=lambda tensor: memory_of(tensor) in changing
            )
            taken.states, taken.weights = self.host_copies.copy(taken.states), copy(taken.weights)
        finally:
            self.copied.set()

    # --- the Trainer's writes -------------------------------------------------------------------------------

    def take_model(
        self, weights: Weights | None, write: Callable[[str, Weights | None], None]
    ) -> None:
        """Take the model, its config and the tokenizer; `write` is the Trainer's, and empties its argument."""
        if not self.trainer.args.should_save:
            return
        assert self.snapshot is not None, "the caller checked it"
        self.snapshot.weights = weights
        self.snapshot.write_model = lambda folder, own: write(
            str(folder), None if own is None else dict(own)
        )
        self.snapshot.check = self.refuse_broken_weights
        saved = saved_parameters(self.trainer.model)
        self.snapshot.model_bytes = sum(
            numbers * parameter.element_size() for parameter, numbers in saved
        )

    def refuse_broken_weights(self, weights: Weights | None) -> None:
        # frozen weights do not change
        trained = {
            name: weight
            for name, weight in self.trainer.model.named_parameters()
            if weight.requires_grad
        }
        given = trained if weights is None else weights
        refuse_non_finite((name, tensor) for name, tensor in given.items() if name in trained)

    def take_states(self, taken: Contents, folder: str) -> None:
        """Take moments, master weights, schedule, and fp16's loss scale."""
        trainer = self.trainer
        if trainer.is_deepspeed_enabled:
            engine, of_adapter = trainer.model_wrapped, isinstance(trainer.model, PeftModel)
            with capture_states(engine, folder) as states:
                engine.save_checkpoint(
                    folder, save_latest=False, exclude_frozen_parameters=of_adapter
                )
            taken.states |= states
            if trainer.args.should_save:
                taken.texts |= {
                    LATEST: f"global_step{engine.global_steps}",
                    **scripts_of_deepspeed(),
                }
        elif trainer.is_fsdp_enabled:
            part = part_here(trainer.model, trainer.engine.optimizer)
            taken.states[file_of_part(trainer.args.process_index, trainer.args.world_size)] = part
        elif trainer.args.should_save:
            taken.states["optimizer.pt"] = trainer.optimizer.state_dict()
            if has_evaluation_point(trainer.optimizer):
                taken.states[TRAINING_POINT] = training_point(trainer.model)
        of_deepspeed = trainer.is_deepspeed_enabled and isinstance(
            trainer.lr_scheduler, DeepSpeedSchedulerWrapper
        )
        if trainer.args.should_save and not of_deepspeed:
            taken.states["scheduler.pt"] = trainer.lr_scheduler.state_dict()
        if trainer.args.should_save and trainer.accelerator.scaler is not None:
            taken.states["scaler.pt"] = trainer.accelerator.scaler.state_dict()


@contextmanager
def temporary_folder(agreement: Agreement) -> Iterator[Path]:
    """A folder that the processes of one machine share."""
    folder = Path(agreement.on_main(tempfile.mkdtemp))
    try:
        yield folder
    finally:
        if is_main_process():
            shutil.rmtree(folder, ignore_errors=True)


def seal_export(trainer: "CPTTrainer", folder: Path) -> None:
    """Write the manifest of a complete export, so that `cpt verify RUN` covers it; for every process."""
    if is_main_process():
        hashes = sorted(hash_all(folder).items())
        files = {
            name: entry
            for name, entry in hashes
            if name != MANIFEST and not name.endswith(WRITTEN_LATER_TOO)
        }
        for inside in [path for path in folder.rglob("*") if path.is_dir()]:
            make_durable(inside)
        write_manifest(
            folder, trainer.checkpointer.describe("weights", trainer.state.global_step, files)
        )


def random_states(trainer: Trainer) -> dict[str, Any]:
    """Return the states of this process's random generators, in the Trainer's format."""
    states: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
    states["cpu"] = torch.random.get_rng_state()
    is_one_of_several = trainer.args.parallel_mode == ParallelMode.DISTRIBUTED
    for kind, device in devices_with_random_states(trainer).items():
        # Without a wait: a GPU's generator is a seed and an offset on the host, which `CUDAGeneratorImpl::get_state`
        # copies into a tensor on the CPU (aten/src/ATen/cuda/CUDAGeneratorImpl.cpp, torch 2.13).
        states[kind] = device.get_rng_state_all() if is_one_of_several else device.get_rng_state()
    return states


def set_random_states(trainer: Trainer, states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    for kind, device in devices_with_random_states(trainer).items():
        saved = states.get(kind, [])
        if isinstance(saved, list):  # for all devices of the machine, maybe fewer than now
            saved = dict(enumerate(saved)).get(device.current_device())
        if saved is not None:
            device.set_rng_state(saved)


def devices_with_random_states(trainer: Trainer) -> dict[str, Any]:
    """Kind of device -> torch's module."""
    kinds = {trainer.args.device.type} - {"cpu", "mps"} | (
        {"cuda"} if torch.cuda.is_available() else set()
    )
    return {kind: torch.get_device_module(kind) for kind in kinds}


def random_states_file(trainer: Trainer) -> str:
    return (
        "rng_state.pth"
        if trainer.args.world_size <= 1
        else f"rng_state_{trainer.args.process_index}.pth"
    )


def progress(trainer: Trainer) -> str:
    """Return the content of trainer_state.json, with the states of callbacks."""
    states: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            states.setdefault(type(callback).__name__, []).append(callback.state())
    known: Any = trainer.state.stateful_callbacks  # annotated as a list, but a dict
    for name, found in states.items():
        known[name] = found[0] if len(found) == 1 else found
    return json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n"
