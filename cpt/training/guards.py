"""Guard each step: skip bad updates, and restart the run after too many of them or after out-of-memory."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.checkpoints.resume import newest_intact, published_checkpoints, set_aside, step_of
from cpt.distributed import is_main_process, main_process_decides, same_command
from cpt.errors import Interrupted, RestartNeeded, TrainingError
from cpt.models.inventory import vocabulary_size
from cpt.optim.gradients import (
    ReleasedGradients,
    check_release,
    clip_gradients,
    gradient_norm,
    releases_gradients,
)
from cpt.optim.schedules import phases_in_tokens
from cpt.recipe.rules import OWN_LOSS
from cpt.torch_internals import reads_scale
from cpt.training.loss_guard import (
    HIGHEST_LOSS,
    STEPS_BEHIND,
    GuardedEngine,
    SkipBudget,
    Spike,
    SpikeDetector,
    StepVerdict,
    find_handler,
)
from cpt.training.restart import ROLLBACK, learned_rollback, remember
from cpt.training.engine import HALF

if TYPE_CHECKING:
    from cpt.training.trainer import CPTTrainer

SAFETY = "safety.json"


class StepGuard(TrainerCallback):
    """Checks each step, skips the update of a bad one, and restarts the run after too many of them.

    A skipped step loses its rows. After too many, the run resumes from the last good checkpoint before them, without
    their rows. With `optimizer.release_gradients` updates happen in the backward pass, so a step is checked only by
    its loss: the gradient norm is known afterwards.

    It must be the last callback, so that it checks the gradients that the optimizer uses.
    """

    def __init__(self, trainer: "CPTTrainer") -> None:
        self.trainer = trainer
        self.loss_guard: SpikeDetector | None = None
        on_spike = trainer.recipe.safety.on_spike
        self.handler = None if on_spike is None else find_handler(on_spike)
        self.budget = SkipBudget(trainer.rows_of_steps, 0, 0)  # unused without a loss guard
        self.last_logged_step = 0
        self.skipped_since_log: list[StepVerdict] = []
        self.new_data_from: set[int] = set()  # steps at which a phase of the data begins
        self.is_updating = False  # the optimizer may have changed weights
        self.released: ReleasedGradients | None = None

    @contextmanager
    def guarding(self, checkpoint: str | None) -> Iterator[None]:
        """Guard the training; restore skipped steps from the checkpoint."""
        trainer = self.trainer
        check_release(trainer.recipe, deepspeed=trainer.is_deepspeed_enabled)
        section = trainer.recipe.safety.loss_guard
        if section is not None:
            highest_loss = math.inf  # losses of other stages have no such scale
            if trainer.recipe.stage in OWN_LOSS:
                highest_loss = HIGHEST_LOSS * math.log(vocabulary_size(trainer.model.config))
            self.loss_guard = SpikeDetector(section, trainer.args.device, highest_loss)
            self.budget = SkipBudget(
                trainer.rows_of_steps, self.loss_guard.window, self.loss_guard.skips
            )
        if checkpoint is not None:
            self.restore(Path(checkpoint) / SAFETY)
        rollback = learned_rollback(trainer.run_folder)
        if (
            rollback is not None and rollback["to_step"] == trainer.first_step
        ):  # the checkpoint predates the roll-back
            trainer.rows_of_steps.left_out = [(first, end) for first, end in rollback["left_out"]]
            self.budget.restore(rollback["budget"])
            trainer.on_rollback()
        elif (
            rollback is not None and rollback["to_step"] > trainer.first_step and is_main_process()
        ):
            # new checkpoints will reuse the numbers
            remember(trainer.run_folder, ROLLBACK, None)
        until = [phase.until for phase in phases_in_tokens(trainer.recipe).phases[:-1]]
        self.new_data_from = {
            tokens // trainer.length.tokens_per_step + 1 for tokens in until if tokens is not None
        }
        self.skipped_since_log = []
        trainer.remove_callback(StepGuard)
        trainer.add_callback(self)  # after callbacks that were added since
        try:
            yield
        finally:
            if self.released is not None:
                self.released.remove()
                self.released = None
                del trainer.accelerator.backward

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Install the checks of steps, after everything is built and loaded."""
        self.last_logged_step = state.global_step
        self.trainer.engine.reshard()
        accelerator = self.trainer.accelerator
        self.trained = [
            parameter for parameter in self.trainer.model.parameters() if parameter.requires_grad
        ]
        if self.trainer.is_deepspeed_enabled and self.loss_guard is not None:
            wrapped = accelerator.deepspeed_engine_wrapped
            if not isinstance(wrapped, GuardedEngine):
                guarded = GuardedEngine(wrapped.engine, self.check_metrics, scales_loss=args.fp16)
                accelerator.deepspeed_engine_wrapped = guarded
        if releases_gradients(self.trainer.recipe) and self.released is None:
            self.released = ReleasedGradients(self.trainer.optimizer.optimizer)
            self.backward_pass = accelerator.backward
            accelerator.backward = self.update_in_backward

    # --- what a checkpoint stores ------------------------------------------------------------------------------------

    def texts(self) -> dict[str, str]:
        """Files of a checkpoint, by name, with which a resumed run makes the same decisions."""
        state: dict[str, Any] = {"format": 1, "left_out": self.trainer.rows_of_steps.left_out}
        if self.loss_guard is not None:
            for verdict in self.loss_guard.read():  # only unread in a save after an error
                self.note_verdict(verdict)
            state |= {"guard": self.loss_guard.state(), "budget": self.budget.state()}
        return {SAFETY: json.dumps(state)}

    def restore(self, file: Path) -> None:
        """Restore the checkpoint's record; checkpoints of other programs lack it."""
        state: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.trainer.rows_of_steps.left_out = [
            (first, end) for first, end in state.get("left_out", [])
        ]
        if self.loss_guard is not None and "guard" in state:
            self.loss_guard.restore(state["guard"])
            self.budget.restore(state["budget"])

    # --- a step ------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Start summing the loss of this step's micro-batches separately."""
        self.is_updating = False
        self.start_next_mean()
        self.loss_before = self.trainer.loss_since_log.clone()
        if self.loss_guard is not None:
            self.trainer.loss_since_log.zero_()
            self.loss_is_lost = torch.zeros_like(self.loss_before, dtype=torch.bool)

    def norm_of_step(self) -> torch.Tensor:
        """The gradient norm for the Trainer's log: a placeholder that the check fills in, because clipping waits."""
        if self.loss_guard is None:
            return self.measure_norm()
        self.norm = torch.zeros((), device=self.trainer.args.device)
        return self.norm

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Clip and check the complete gradients; skip the update of a bad step. DeepSpeed has already used them."""
        self.is_updating = True
        if self.loss_guard is None:
            return
        if self.released is not None:
            norm, skip = self.released.norm().to(self.loss_of_step.device), self.skip
            self.loss_guard.learn_norm(norm, skipped=skip)
            metrics = torch.stack((self.loss_of_step, norm))
            self.loss_guard.note(state.global_step + 1, torch.cat((metrics, self.spikes.float())))
            self.count_loss(skip | ~norm.isfinite())
            return
        if self.trainer.is_deepspeed_enabled:
            self.count_loss(self.loss_is_lost)
            return
        self.norm.copy_(self.measure_norm())
        metrics = torch.stack((self.trainer.loss_since_log, self.norm))
        if args.world_size > 1:
            dist.all_reduce(metrics)
            metrics /= args.world_size
        skip = self.check_metrics(metrics)
        self.count_loss(self.loss_is_lost)
        kernel, scaler = self.kernel_of_optimizer(), self.trainer.accelerator.scaler
        if kernel is not None:
            kernel.found_inf = skip.float()
            return
        loss, norm = (
            metrics.tolist()
        )  # only here the host waits: this kernel does not read a device flag
        # The scaler skips steps with infinite gradients, and lowers its scale.
        scale_is_too_large = scaler is not None and math.isfinite(loss) and not math.isfinite(norm)
        if bool(skip) and not scale_is_too_large:
            self.trainer.accelerator.sync_gradients = (
                False  # accelerate then skips the optimizer step
            )

    def count_loss(self, skip: torch.Tensor) -> None:
        """Add this step's loss to the sum since the last log, unless the step is skipped."""
        total = self.trainer.loss_since_log
        total.copy_(torch.where(skip, self.loss_before, self.loss_before + total))

    def measure_norm(self) -> torch.Tensor:
        """Clip the gradients to `training.max_grad_norm` if positive; return the norm before clipping."""
        trainer, most, kernel = (
            self.trainer,
            self.trainer.args.max_grad_norm,
            self.kernel_of_optimizer(),
        )
        model = trainer.model_wrapped
        if kernel is not None:  # it divides gradients by a device scalar, without another pass
            norm = gradient_norm(
                [parameter.grad for parameter in self.trained if parameter.grad is not None]
            )
            if most > 0:
                kernel.grad_scale = ((norm + 1e-6) / most).clamp(
                    min=1
                )  # torch's clipping divides by the same
            return norm
        if trainer.accelerator.scaler is None:
            gradients = [
                parameter.grad for parameter in model.parameters() if parameter.grad is not None
            ]
            # torch's norm would be rounded for half precision or shards
            if gradients and (
                trainer.is_fsdp_enabled or any(gradient.dtype in HALF for gradient in gradients)
            ):
                return clip_gradients(gradients, most) if most > 0 else gradient_norm(gradients)
        return trainer.clip_by_accelerate(model.parameters(), most if most > 0 else math.inf)

    def kernel_of_optimizer(self) -> Any:
        """The optimizer, if its kernel reads `grad_scale` and `found_inf` from the device; else None."""
        kernel = self.trainer.optimizer.optimizer
        reads = self.trainer.accelerator.scaler is None and reads_scale(kernel)
        return kernel if reads else None

    def check_metrics(self, metrics: torch.Tensor) -> torch.Tensor:
        """Return whether to skip the current step, on the device."""
        assert self.loss_guard is not None, "steps are only checked with a guard"
        step = self.trainer.state.global_step + 1
        if step in self.new_data_from:  # another phase's data may have another loss level
            self.loss_guard.forget()
        metrics = self.trainer.metrics_to_check(metrics)
        skip = self.loss_guard.check(step, metrics)
        loss, norm = metrics.isfinite()
        scale_is_too_large = loss & ~norm & self.trainer.args.fp16  # no skipped step
        self.loss_is_lost.copy_(skip & ~scale_is_too_large)
        return skip

    # --- steps that update in the backward pass ----------------------------------------------------------------------

    def update_in_backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward pass, which updates the weights; the loss is checked before, on the device."""
        assert self.released is not None, (
            "only replaces the accelerator's backward with released gradients"
        )
        self.is_updating = True  # from here on the step cannot be redone
        if self.loss_guard is None:
            self.released.begin(None)
        else:
            if self.trainer.state.global_step + 1 in self.new_data_from:
                self.loss_guard.forget()
            self.loss_of_step = loss.detach().float()
            metrics = torch.stack((self.loss_of_step, torch.zeros_like(self.loss_of_step)))
            self.skip, self.spikes = self.loss_guard.decide(metrics)
            self.released.begin(self.skip)
        self.backward_pass(loss, **options)

    # --- end of a step -----------------------------------------------------------------------------------------------

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Make sure that all steps so far are good before anything is logged, measured or saved.

        Raises:
            RestartNeeded: too many steps were skipped; see `roll_back`.
            TrainingError: the recovery handler ended the run.
        """
        checkpointer = self.trainer.checkpointer
        is_due = (
            control.should_save
            or control.should_log
            or control.should_evaluate
            or control.should_training_stop
        )
        unread = 0 if is_due or checkpointer.weights_due else STEPS_BEHIND
        if self.loss_guard is not None:
            for verdict in self.loss_guard.read(unread=unread):
                action = self.action_after(verdict) if self.note_verdict(verdict) else "skip"
                if action == "abort":
                    why, handler = verdict.complaint(), self.trainer.recipe.safety.on_spike
                    end = f"`safety.on_spike: {handler and handler.name}` ends the run"
                    raise TrainingError(
                        f"step {verdict.step} was skipped: {why}. {end}. {self.newest_saved()}"
                    )
                if action == "roll_back":
                    self.roll_back(self.loss_guard)
        if (kind := checkpointer.weights_due) is not None and not control.should_save:
            checkpointer.save_once(kind)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.start_next_mean()

    def start_next_mean(self) -> None:
        if self.last_logged_step == self.trainer.state.global_step:
            # The Trainer resets it by subtraction, which would keep NaN.
            self.trainer.loss_since_log.zero_()
            self.skipped_since_log = []

    def correct_loss(self, logs: dict[str, float]) -> None:
        """Log the mean loss of the accepted steps; without any, the loss of the last step."""
        if "loss" not in logs:
            return
        step = self.trainer.state.global_step
        num_steps, self.last_logged_step = step - self.last_logged_step, step
        if skipped := self.skipped_since_log:
            counted = num_steps - len(skipped)
            logs["loss"] = logs["loss"] * num_steps / counted if counted > 0 else skipped[-1].loss
            logs["skipped_steps"] = len(skipped)

    # --- skipped steps -----------------------------------------------------------------------------------------------

    def note_verdict(self, verdict: StepVerdict) -> bool:
        """Record the step if it was skipped, and return whether it was."""
        if (
            self.trainer.args.fp16
            and math.isfinite(verdict.loss)
            and not math.isfinite(verdict.gradient_norm)
        ):
            return False  # the scaler adjusts its scale
        skipped = self.budget.note(verdict)
        if skipped is None:
            return False
        self.skipped_since_log.append(verdict)
        first, end = skipped.rows
        self.trainer.checkpointer.record(
            "spike_skipped" if verdict.is_finite else "nan_skipped",
            f"Step {verdict.step} was skipped: {verdict.complaint()}. Its rows are {first:,} to {end - 1:,}.",
            step=verdict.step,
            rows=[first, end],
            loss=str(verdict.loss),
            gradient_norm=str(verdict.gradient_norm),
        )
        return True

    def action_after(self, verdict: StepVerdict) -> str:
        """What follows a skipped step, the same on all processes: by the recipe's handler, else by the loss guard."""
        recent, rollbacks, handler = len(self.budget.recent), self.budget.rollbacks, self.handler
        spike = Spike(
            verdict.step,
            verdict.loss,
            verdict.gradient_norm,
            recent,
            rollbacks,
            self.trainer.run_folder,
        )
        action = None if handler is None else main_process_decides(lambda: handler(spike))
        return action or ("roll_back" if self.budget.is_exhausted else "skip")

    def newest_saved(self) -> str:
        newest = published_checkpoints(self.trainer.run_folder)
        return f"The newest checkpoint is {newest[-1]}." if newest else "Nothing is saved."

    def roll_back(self, guard: SpikeDetector) -> None:
        """Restart from the last good checkpoint before the skipped steps, without their rows.

        Without such a checkpoint the run continues: the skipped updates never changed its weights.

        Raises:
            RestartNeeded: there is such a checkpoint.
            Interrupted: there is such a checkpoint, and a signal asked the run to stop.
            TrainingError: the run has used up its roll-backs.
        """
        trainer, budget, folder = self.trainer, self.budget, self.trainer.run_folder
        steps = ", ".join(str(skipped.step) for skipped in budget.recent)
        if budget.rollbacks >= guard.rollbacks:
            raise TrainingError(
                f"the training diverged: steps {steps} were skipped, after {budget.rollbacks} roll-back(s)"
                f" ({budget.total} skipped steps in all; events.jsonl has their rows). {self.newest_saved()} Lower"
                " `optimizer.learning_rate`, check the data of these rows, or raise `safety.loss_guard.skips`,"
                " `rollbacks`."
            )
        bad = budget.roll_back()
        trainer.checkpointer.wait_for_saves()
        checkpoint = main_process_decides(lambda: newest_intact(folder, up_to=bad[0].step - 1))
        what = "continues, because no checkpoint is older"
        if checkpoint is not None:
            what = f"resumes from {checkpoint.name} without their rows"
        message = (
            f"{len(bad)} of the last {budget.window} steps were skipped ({steps}): the run {what} (roll-back"
            f" {budget.rollbacks} of {guard.rollbacks})."
        )
        trainer.checkpointer.record(
            "rolled_back",
            message,
            step=bad[-1].step,
            to_step=None if checkpoint is None else step_of(checkpoint),
            left_out=[skipped.rows for skipped in bad],
            rollbacks=budget.rollbacks,
        )
        if checkpoint is None:
            return
        trainer.rows_of_steps.leave_out(skipped.rows for skipped in bad)

        def leave_for_next_start() -> None:
            to_step, left_out = step_of(checkpoint), trainer.rows_of_steps.left_out
            remember(
                folder,
                ROLLBACK,
                {"to_step": to_step, "left_out": left_out, "budget": budget.state()},
            )
            later = [path for path in published_checkpoints(folder) if step_of(path) > to_step]
            set_aside(folder, later, f"the run went back to {checkpoint.name}")

        main_process_decides(leave_for_next_start)
        if (
            trainer.control.should_training_stop
            and trainer.state.global_step < trainer.state.max_steps
        ):
            raise Interrupted(f"{message} {same_command()} continues.")
        raise RestartNeeded(message)
