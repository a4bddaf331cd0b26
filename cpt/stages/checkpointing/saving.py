"""Save so that nothing is ever lost: what all processes do together comes first, then each writes, then one rename
publishes.

A checkpoint holds what the Trainer would have written, and a manifest. No write stands between what processes do
together, so a disk that fails on one of them leaves all of them in step: the save is given up on all, and training
goes on.
"""

import logging
import time
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers.trainer_utils import TrainOutput
from xxhash import xxh3_128_hexdigest

from cpt.checkpoints.agreement import SaveFailed
from cpt.checkpoints.archive import Archive
from cpt.checkpoints.in_flight import SaveInFlight
from cpt.checkpoints.manifest import FORMAT, FileEntry, Manifest
from cpt.checkpoints.read_back import read_back
from cpt.checkpoints.rotation import published_in, rotate
from cpt.checkpoints.snapshot import mark
from cpt.checkpoints.transaction import Contents, clear_leftovers, publish
from cpt.errors import CheckpointError, TrainingError
from cpt.recipe.load import dump_recipe
from cpt.recipe.schema import Recipe
from cpt.runs.events import record_event
from cpt.stages.checkpointing.data_position import DataPosition
from cpt.stages.checkpointing.snapshots import Snapshots
from cpt.stages.checkpointing.trainer_states import versions
from cpt.stages.length import RunLength

log = logging.getLogger("cpt")

Describe = Callable[[dict[str, FileEntry]], Manifest]
Kind = Literal["full", "weights"]
PREFIXES: dict[Kind, str] = {"full": "checkpoint-", "weights": "weights-"}
SECONDS_BEFORE_RETRIES = (2.0, 8.0)  # of the last save of a run, which no later one makes up for


class TransactionalSaves(Snapshots):
    """The Trainer's saving, as transactions; `recipe.checkpoints` says how often, how many stay, and whether training
    waits."""

    recipe: Recipe
    length: RunLength
    save_failure: SaveFailed | None = None
    """Why the last save was not published; None where it was."""
    step_saved = 0
    """The step of the last save."""
    not_pushed: Path | None = None
    """A checkpoint that the Hub has not been given, where the recipe says so."""

    @cached_property
    def in_flight(self) -> SaveInFlight:
        """The save that is being written, at most one."""
        return SaveInFlight()

    @cached_property
    def kinds_read_back(self) -> set[Kind]:
        """What this process has proved to be readable."""
        return set()

    @cached_property
    def archive(self) -> Archive | None:
        """The second place, for the main process."""
        place = self.recipe.checkpoints.archive
        return Archive(self.run_folder, place) if place is not None and self.args.should_save else None

    @property
    def run_folder(self) -> Path:
        """Where checkpoints are published."""
        return Path(str(self.args.output_dir))

    @property
    def rows_trained(self) -> int:
        """Rows of the run that lie behind it."""
        return self.state.global_step * self.length.rows_per_step

    def checkpoint_texts(self) -> dict[str, str]:
        """The place in the data."""
        texts = super().checkpoint_texts()
        for position in self.data_positions():
            texts |= position.texts(self.rows_trained)
        return texts

    def data_positions(self) -> list[DataPosition]:
        """None where a program of the user's own built the trainer."""
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, DataPosition)]

    # --- when to save ------------------------------------------------------------------------------------------------

    def train(self, *arguments: Any, **options: Any) -> TrainOutput:
        """Train; no save is in flight when it returns or raises."""
        if self.args.should_save and (names := clear_leftovers(self.run_folder)):
            log.info("%s: removed what a stopped run left unfinished: %s.", self.run_folder, ", ".join(names))
        if self.archive is not None:
            self.archive.add_missing([checkpoint.folder for checkpoint in published_in(self.run_folder)])
        self.agreement.gather(
            None
        )  # connected now: where the launcher is killed later, nobody is left who could introduce the processes
        hook = register_optimizer_step_pre_hook(self.wait_for_copies)
        try:
            output = super().train(*arguments, **options)
        except BaseException:
            try:
                self.wait_for_saves()
            except Exception as problem:  # what went wrong first must be heard
                log.warning("The save in flight failed too: %s", problem)
            raise
        finally:
            hook.remove()
        self.wait_for_saves()
        if self.archive is not None:
            self.archive.finish()
        return output

    def wait_for_saves(self) -> None:
        """Return when no save is in flight; every process must call it.

        Raises:
            SaveFailed: the last one failed in a way that no later one will do better.
        """
        self.in_flight.wait()
        self.push()

    def push(self) -> None:
        """Give the Hub what was published, as `training.push_to_hub` and `hub_strategy` say."""
        checkpoint, self.not_pushed = self.not_pushed, None
        if checkpoint is not None and self.args.push_to_hub:
            self._push_from_checkpoint(str(checkpoint))

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """As the Trainer does; then the weights alone, where they are due and this step's are not saved yet."""
        super()._maybe_log_save_evaluate(*arguments, **options)
        every = self.recipe.checkpoints.weights_every_steps
        if every is not None and self.state.global_step % every == 0 and self.state.global_step != self.step_saved:
            self.save_once("weights")

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Publish `checkpoint-N`, or tell why not; the last one of a run is tried again, and has to succeed."""
        self.store_flos()
        self.save_once("full")
        if not self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            return
        self.wait_for_saves()
        for seconds in SECONDS_BEFORE_RETRIES:
            if self.save_failure is None or self.save_failure.reason != "storage":
                break
            time.sleep(seconds)
            self.save_once("full")
            self.wait_for_saves()
        if self.save_failure is not None:
            raise self.unsaved_end(self.save_failure)

    def unsaved_end(self, failure: SaveFailed) -> CheckpointError | TrainingError:
        """A run whose last save failed has not done what it was started for."""
        newest = published_in(self.run_folder)[-1:]
        where = f"The newest checkpoint is {newest[0].folder}; " if newest else "There is no checkpoint; "
        text = (
            f"step {self.state.global_step} could not be saved ({failure}). {where}when this is mended, start the run"
            " again."
        )
        return TrainingError(text) if failure.reason == "not finite" else CheckpointError(text)

    # --- one save ----------------------------------------------------------------------------------------------------

    def save_once(self, kind: Kind) -> None:
        """Take a snapshot of this step, and have it written: now, or while training goes on."""
        self.wait_for_saves()
        step = self.step_saved = self.state.global_step
        beside = self.recipe.checkpoints.in_background and not self.changes_unasked
        contents = self.take_snapshot(full=kind == "full", beside_training=beside)
        in_background = beside and self.detach(contents)
        moment = mark() if in_background and self.args.device.type != "cpu" else None
        copy = partial(self.copy_to_host, contents, moment) if in_background else None
        save = partial(
            self.write_out, kind, step, contents, partial(self.describe, kind, step, self.rows_trained), copy
        )
        self.in_flight.run(save, in_background=in_background)
        if not in_background:
            self.push()

    def write_out(
        self, kind: Kind, step: int, contents: Contents, describe: Describe, copy: Callable[[], None] | None
    ) -> None:
        """Publish, then tidy up; on a failure say so, and let training go on where a later save may do better."""
        name = f"{PREFIXES[kind]}{step}"
        check = None if kind in self.kinds_read_back else partial(read_back, model=self.saved_model)
        try:
            if copy is not None:
                self.agreement.together(copy)
            publish(self.run_folder, name, contents, describe, self.agreement, read_back=check)
        except SaveFailed as failure:
            self.save_failure = failure
            if self.args.should_save:
                record_event(
                    self.run_folder,
                    "save_failed",
                    f"{name} was not saved: {failure}.",
                    step=step,
                    reason=failure.reason,
                )
            if failure.reason == "error":
                raise
            return
        finally:
            self.host_copies.release()
        before, self.save_failure = self.save_failure, None
        self.kinds_read_back.add(kind)
        if kind == "full":
            self.not_pushed = self.run_folder / name
        if self.args.should_save:
            if before is not None:  # the event of the failure may have found no place on a full disk
                record_event(
                    self.run_folder,
                    "saved_again",
                    f"{name} was saved; before it: {before}.",
                    step=step,
                    reason=before.reason,
                )
            self.tidy_up(kind, self.run_folder / name)

    def tidy_up(self, kind: Kind, published: Path) -> None:
        """Copy the new checkpoint to the archive, and remove the old ones that need not stay."""
        if self.archive is not None and kind == "full":
            self.archive.add(published)
        spared = self.archive.in_use() if self.archive is not None else set()
        try:
            rotate(self.run_folder, self.recipe.checkpoints.kept, prefix=PREFIXES[kind], spared=spared)
        except (
            Exception
        ) as problem:  # of the disk, or of a rule of the user's own: this process alone must not end for it
            record_event(
                self.run_folder,
                "not_removed",
                f"Old checkpoints could not be removed: {type(problem).__name__}: {problem}.",
            )

    def describe(self, kind: Kind, step: int, rows: int, files: dict[str, FileEntry]) -> Manifest:
        """The manifest."""
        return Manifest(
            format=FORMAT,
            kind=kind,
            step=step,
            rows=rows,
            tokens=step * self.length.tokens_per_step,
            world_size=self.args.world_size,
            zero_stage=None if self.zero_section is None else int(self.zero_section.get("stage", 0)),
            exactness=self.exactness,
            recipe=xxh3_128_hexdigest(dump_recipe(self.recipe).encode()),
            data=next((position.data.fingerprint for position in self.data_positions()), ""),
            versions=versions(),
            files=files,
        )
