"""Count skipped steps; after too many, go back to a sound checkpoint inside the running process and leave the rows out
that led to it."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from cpt.checkpoints.resume import newest_sound, published_checkpoints, set_aside, step_of
from cpt.checkpoints.safe_load import only_data
from cpt.checkpoints.ways import is_zero
from cpt.data.mixture import RowsOfSteps
from cpt.errors import TrainingError
from cpt.ranks import is_main_process, main_process_decides
from cpt.runs.events import record_event
from cpt.safety.loss_guard import Judged, LossGuard
from cpt.safety.skip_budget import SkipBudget, Skipped
from cpt.stages.checkpointing.other_ways import way_written
from cpt.stages.checkpointing.resuming import written_for
from cpt.stages.checkpointing.saving import TransactionalSaves

SAFETY = "safety.json"


class RollBack(Exception):  # noqa: N818 - it is a decision, taken where the Trainer's loop has to be left
    """Go back to this checkpoint, on all ranks."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(checkpoint)
        self.checkpoint = checkpoint


class RollingBack(TransactionalSaves):
    """A Trainer that takes in the guard's verdicts and can go back."""

    rows_of_steps: RowsOfSteps
    guard: LossGuard | None = None
    budget: SkipBudget | None = None
    skipped_since_log: list[Judged]

    # --- what a checkpoint keeps -------------------------------------------------------------------------------------

    def safety_state(self) -> dict[str, Any]:
        """For `safety.json` of a checkpoint: with it a resumed run decides as this one does."""
        state: dict[str, Any] = {"format": 1, "left_out": self.rows_of_steps.left_out}
        if self.guard is not None and self.budget is not None:
            for judged in self.guard.read():  # nothing is left to read but in a save after an error
                self.take_in(judged)
            state |= {"guard": self.guard.state(), "budget": self.budget.state()}
        return state

    def restore_safety(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint kept."""
        self.rows_of_steps.left_out = [(first, end) for first, end in state.get("left_out", [])]
        if self.guard is not None and self.budget is not None and "guard" in state:
            self.guard.restore(state["guard"])
            self.budget.restore(state["budget"])

    def checkpoint_texts(self) -> dict[str, str]:
        """With what the guard knows."""
        return {**super().checkpoint_texts(), SAFETY: json.dumps(self.safety_state())}

    @property
    def rows_trained(self) -> int:
        """Rows that lie behind the run, those left out included."""
        return self.rows_of_steps.first(self.state.global_step)

    # --- the verdicts ------------------------------------------------------------------------------------------------

    def settle(self, *, unread: int) -> None:
        """Take in the verdicts that have arrived, in their order, so that it does not matter when they are read.

        Raises:
            RollBack: too many steps were skipped.
            TrainingError: that happened too often.
        """
        if self.guard is None or self.budget is None:
            return
        for judged in self.guard.read(unread=unread):
            self.take_in(judged)
            if self.budget.is_exhausted:
                self.give_way()

    def take_in(self, judged: Judged) -> None:
        """Count and tell a step that was skipped."""
        assert self.budget is not None
        if self.args.fp16 and math.isfinite(judged.loss) and not math.isfinite(judged.gradient_norm):
            return  # the scale of the loss is being looked for
        skipped = self.budget.note(judged)
        if skipped is not None:
            self.skipped_since_log.append(judged)
            self.tell_skipped(judged, skipped)

    def tell_skipped(self, judged: Judged, skipped: Skipped) -> None:
        """Write down which rows were lost, and why."""
        if is_main_process():
            first, end = skipped.rows
            record_event(
                self.run_folder,
                "spike_skipped" if judged.is_finite else "nan_skipped",
                f"Step {judged.step} was skipped: {judged.complaint()}. Its rows are {first:,} to {end - 1:,}.",
                step=judged.step,
                rows=[first, end],
                loss=str(judged.loss),
                gradient_norm=str(judged.gradient_norm),
            )

    def give_way(self) -> None:
        """Go back before the steps that were skipped, or on without their rows where no checkpoint is that old.

        Raises:
            RollBack: there is one.
            TrainingError: the run went back often enough.
        """
        assert self.guard is not None and self.budget is not None
        if self.budget.rollbacks >= self.guard.rollbacks:
            raise TrainingError(self.why_it_stops())
        bad = self.budget.roll_back()
        before = bad[0].step - 1
        self.wait_for_saves()
        checkpoint = main_process_decides(lambda: newest_sound(self.run_folder, up_to=before))
        if checkpoint is not None and not self.can_read_now(checkpoint):
            checkpoint = None
        if is_main_process():
            steps = ", ".join(str(skipped.step) for skipped in bad)
            where = (
                f"the run goes back to {checkpoint.name}"
                if checkpoint is not None
                else "there is no checkpoint from before them"
            )
            record_event(
                self.run_folder,
                "rolled_back",
                f"{len(bad)} of the last {self.budget.window} steps were skipped ({steps}): {where}, and goes on"
                f" without their rows (roll-back {self.budget.rollbacks} of {self.guard.rollbacks}).",
                step=bad[-1].step,
                to_step=None if checkpoint is None else step_of(checkpoint),
                left_out=[skipped.rows for skipped in bad],
                rollbacks=self.budget.rollbacks,
            )
        if checkpoint is not None:
            raise RollBack(checkpoint)

    def can_read_now(self, checkpoint: Path) -> bool:
        """Only a start can read ZeRO's parts of another number of processes, of another stage, or with states that
        moved."""
        written = way_written(checkpoint)
        if self.is_of_other_kernel(checkpoint):
            return False
        is_own = written in (None, self.way) and written_for(checkpoint) == self.args.world_size
        return is_own or not is_zero(written or self.way)

    def why_it_stops(self) -> str:
        """The last word, with what to do."""
        assert self.guard is not None and self.budget is not None
        steps = ", ".join(str(skipped.step) for skipped in self.budget.recent)
        newest = published_checkpoints(self.run_folder)
        saved = f"The newest checkpoint is {newest[-1]}." if newest else "Nothing is saved."
        return (
            f"the training diverged: steps {steps} had to be skipped, after {self.budget.rollbacks} roll-back(s)"
            f" already ({self.budget.total} skipped steps in all; events.jsonl has their rows). {saved} Lower"
            " `optimizer.learning_rate`, look at the data of these rows, or allow more: `safety.loss_guard.skips`,"
            " `rollbacks`."
        )

    # --- back --------------------------------------------------------------------------------------------------------

    def go_back(self, checkpoint: Path, *, num_steps: int) -> None:
        """Be what the run was at this checkpoint, but for the rows that are left out from now on."""
        assert self.budget is not None
        learned = self.budget.state(), list(self.rows_of_steps.left_out)
        at_end = self.state.global_step >= self.state.max_steps
        self._init_training_state(self.state.max_steps, num_steps, self.state.num_train_epochs, str(checkpoint), None)
        with only_data(checkpoint, trust=False):
            if self.reads_by_name(checkpoint):
                self.load_by_name(checkpoint, trust=False)
            elif self.is_deepspeed_enabled:
                deepspeed_load_checkpoint(
                    self.model_wrapped, str(checkpoint), load_module_strict=self.recipe.model.lora is None
                )
            else:
                self._load_from_checkpoint(str(checkpoint))
            if not self.reads_by_name(checkpoint):
                self._load_optimizer_and_scheduler(str(checkpoint))
        self._load_scaler(str(checkpoint))
        self.restore_safety(read_safety(checkpoint))
        budget, self.rows_of_steps.left_out = learned
        self.budget.restore(budget)
        self.skipped_since_log = []
        self._tr_loss.zero_()
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        if at_end:
            self.control.should_training_stop = False
        main_process_decides(lambda: self.put_aside_after(checkpoint))

    def put_aside_after(self, checkpoint: Path) -> None:
        """What was saved after it belongs to a way that the run no longer takes."""
        later = [path for path in published_checkpoints(self.run_folder) if step_of(path) > step_of(checkpoint)]
        set_aside(self.run_folder, later, f"the run went back to {checkpoint.name}")


def read_safety(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint knows of skipped steps; nothing, where another program wrote it."""
    path = checkpoint / SAFETY
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content
