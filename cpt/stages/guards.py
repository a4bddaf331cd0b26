"""Guard each step: skip bad updates, and restart the run where too many were bad or where memory ran out."""

import gc
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from cpt.checkpoints.resume import newest_sound, published_checkpoints, set_aside, step_of
from cpt.errors import Interrupted, ResourceError, RestartNeeded, TrainingError
from cpt.models.inventory import vocabulary_size
from cpt.optim.clipping import gradient_norm
from cpt.optim.released import ReleasedGradients, check_release, releases_gradients
from cpt.optim.schedules import phases_in_tokens
from cpt.ranks import is_main_process, main_process_decides, rank, same_command
from cpt.runs.events import record_event
from cpt.safety.judging_engine import JudgingEngine
from cpt.safety.loss_guard import HIGHEST_LOSS, STEPS_BEHIND, Judged, LossGuard, SkipBudget
from cpt.safety.restart import (
    forget_rollback,
    is_out_of_memory,
    learned_micro_batch,
    learned_rollback,
    remember_micro_batch,
    remember_rollback,
    smaller_micro_batch,
)
from cpt.stages.saving import SavingTrainer

OF_LANGUAGE_MODELS = ("pretrain", "cpt", "sft")
SAFETY = "safety.json"


class StepGuardCallback(TrainerCallback):
    """Runs after every other callback: what it judges is what the optimizer gets."""

    def __init__(self, trainer: "GuardedTrainer") -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.trainer.begin_guarding()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The gradients are complete; under DeepSpeed they are used already."""
        self.trainer.judge_step()


class GuardedTrainer(SavingTrainer):
    """The Trainer's loop with a loss guard, and restarts after too many skipped steps or out-of-memory.

    A skipped step costs its rows. After too many, the run resumes from the last sound checkpoint before them and
    leaves their rows out. With `optimizer.release_gradients` the updates are made in the backward pass, so a step is
    judged by its loss alone: the gradient's norm is only known afterwards.
    """

    first_step: int
    guard: LossGuard | None = None
    budget: SkipBudget | None = None
    skipped_since_log: list[Judged]
    new_data_from: set[int]
    """Steps at which a phase of the data begins."""
    is_updating = False
    """From the moment on when the optimizer may have changed weights."""
    released: ReleasedGradients | None = None
    skip: torch.Tensor
    spikes: torch.Tensor
    loss_of_step: torch.Tensor
    backward_pass: Callable[..., None]

    def train(self, resume_from_checkpoint: str | Path | None = None, **options: Any) -> TrainOutput:  # type: ignore[override]
        check_release(self.recipe, deepspeed=self.is_deepspeed_enabled)
        section = self.recipe.safety.loss_guard
        if section is not None:
            self.guard = LossGuard(section, self.args.device, self.highest_loss())
            self.budget = SkipBudget(self.rows_of_steps, self.guard.window, self.guard.skips)
        if resume_from_checkpoint is not None:
            self.restore_safety(read_safety(Path(resume_from_checkpoint)))
        self.restore_rollback()
        until = [phase.until for phase in phases_in_tokens(self.recipe).phases[:-1]]
        self.new_data_from = {tokens // self.length.tokens_per_step + 1 for tokens in until if tokens is not None}
        self.skipped_since_log = []
        self.remove_callback(StepGuardCallback)
        self.add_callback(StepGuardCallback(self))  # behind those that were added since
        accelerator: Any = self.accelerator
        try:
            return super().train(resume_from_checkpoint, **options)  # type: ignore[arg-type]
        finally:
            if self.released is not None:
                self.released.remove()
                self.released = None
                del accelerator.backward

    def highest_loss(self) -> float:
        """Of a language model's own loss, which starts near that of a uniform guess; the other stages have losses
        without such a scale."""
        if self.recipe.stage not in OF_LANGUAGE_MODELS:
            return math.inf
        model: Any = self.model
        return HIGHEST_LOSS * math.log(vocabulary_size(model.config))

    def begin_guarding(self) -> None:
        """Hook in where a step can be judged, once everything is built and loaded."""
        self.reshard()
        model: Any = self.model
        accelerator: Any = self.accelerator
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if (
            self.is_deepspeed_enabled
            and self.guard is not None
            and not isinstance(accelerator.deepspeed_engine_wrapped, JudgingEngine)
        ):
            engine = accelerator.deepspeed_engine_wrapped.engine
            accelerator.deepspeed_engine_wrapped = JudgingEngine(
                engine, self.judge_figures, scales_loss=self.args.fp16
            )
        if releases_gradients(self.recipe) and self.released is None:
            wrapper: Any = self.optimizer
            self.released = ReleasedGradients(wrapper.optimizer)
            self.backward_pass = accelerator.backward
            accelerator.backward = self.update_in_backward

    # --- what a checkpoint stores ------------------------------------------------------------------------------------

    def checkpoint_texts(self) -> dict[str, str]:
        return {**super().checkpoint_texts(), SAFETY: json.dumps(self.safety_state())}

    def safety_state(self) -> dict[str, Any]:
        """With it a resumed run decides as this one does."""
        state: dict[str, Any] = {"format": 1, "left_out": self.rows_of_steps.left_out}
        if self.guard is not None and self.budget is not None:
            for judged in self.guard.read():  # unread only in a save after an error
                self.note_verdict(judged)
            state |= {"guard": self.guard.state(), "budget": self.budget.state()}
        return state

    def restore_safety(self, state: Mapping[str, Any]) -> None:
        self.rows_of_steps.left_out = [(first, end) for first, end in state.get("left_out", [])]
        if self.guard is not None and self.budget is not None and "guard" in state:
            self.guard.restore(state["guard"])
            self.budget.restore(state["budget"])

    def restore_rollback(self) -> bool:
        """Leave out the rows of a roll-back to this checkpoint; False if there was none."""
        rollback = learned_rollback(self.run_folder)
        if rollback is None or rollback["to_step"] != self.first_step:
            if rollback is not None and rollback["to_step"] > self.first_step and is_main_process():
                forget_rollback(self.run_folder)
            return False
        self.rows_of_steps.left_out = [(first, end) for first, end in rollback["left_out"]]
        if self.budget is not None:
            self.budget.restore(rollback["budget"])
        return True

    # --- a step ------------------------------------------------------------------------------------------------------

    @property
    def judges_gradients(self) -> bool:
        """True where the gradients are whole before the optimizer's step: everywhere but under DeepSpeed."""
        return self.guard is not None and not self.is_deepspeed_enabled

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """A step begins: the loss of its micro-batches is summed apart from that of the steps before."""
        self.is_updating = False
        self.loss_before = self._tr_loss.clone()
        if self.judges_gradients:
            self._tr_loss.zero_()
        return super().get_batch_samples(*arguments, **options)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clipping waits for `judge_step`; the norm that is logged is filled in then."""
        if self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        if self.guard is None:
            return self.measure_norm()
        self.norm = torch.zeros((), device=self.args.device)
        return self.norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if self.released is not None:
            return self.released.norm()
        if self.is_deepspeed_enabled:
            return super()._get_grad_norm(model, grad_norm)
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def judge_step(self) -> None:
        """Clip, judge, and have the update skipped where the step is bad."""
        self.is_updating = True
        if self.released is not None:
            self.note_released(self.released)
            return
        if not self.judges_gradients:
            return
        norm = self.measure_norm()
        self.norm.copy_(norm)
        figures = torch.stack((self._tr_loss, self.norm))
        if self.args.world_size > 1:
            dist.all_reduce(figures)
            figures /= self.args.world_size
        skip = self.judge_figures(figures)
        self._tr_loss.copy_(torch.where(skip, self.loss_before, self.loss_before + self._tr_loss))
        self.skip_update(skip, figures)

    def measure_norm(self) -> torch.Tensor:
        """The norm of all gradients before clipping, and have them clipped.

        Where the optimizer's kernel divides gradients by a number on the device, they are not written twice.
        """
        model: Any = self.model_wrapped
        most, kernel = self.args.max_grad_norm, self.kernel_of_optimizer()
        if kernel is None:
            clipped = super()._clip_grad_norm(model) if most > 0 else None
            return super()._get_grad_norm(model, clipped)  # type: ignore[no-any-return]
        norm = gradient_norm([parameter.grad for parameter in self.trained if parameter.grad is not None])
        if most > 0:
            kernel.grad_scale = ((norm + 1e-6) / most).clamp(min=1)  # what torch's own clipping divides by
        return norm

    def kernel_of_optimizer(self) -> Any:
        """The optimizer, if its kernel reads from the device what to divide by and whether to skip; else None."""
        wrapper: Any = self.optimizer
        kernel = wrapper.optimizer
        reads = self.accelerator.scaler is None and vars(kernel).get("_step_supports_amp_scaling", False)
        return kernel if reads and not self.is_fsdp_enabled else None

    def judge_figures(self, figures: torch.Tensor) -> torch.Tensor:
        """Whether the current step has to be skipped, on the device."""
        assert self.guard is not None
        step = self.state.global_step + 1
        if step in self.new_data_from:  # a phase's data may have a loss of another level
            self.guard.forget()
        return self.guard.judge(step, figures)

    def skip_update(self, skip: torch.Tensor, figures: torch.Tensor) -> None:
        """The host only waits where the optimizer's kernel does not read a flag from the device."""
        kernel, scaler = self.kernel_of_optimizer(), self.accelerator.scaler
        if kernel is not None:
            kernel.found_inf = skip.float()
            return
        loss, norm = figures.tolist()
        # The scaler skips such a step, and lowers its scale.
        scale_is_too_large = scaler is not None and math.isfinite(loss) and not math.isfinite(norm)
        if bool(skip) and not scale_is_too_large:
            # accelerate's optimizer only steps with gradients of all ranks
            self.accelerator.gradient_state._set_sync_gradients(False)

    # --- a step that updates in its backward pass --------------------------------------------------------------------

    def update_in_backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The backward pass, which updates the weights; its loss is judged before, on the device."""
        assert self.released is not None, "in place of the accelerator's only then"
        self.is_updating = True  # from here on the step cannot be redone
        if self.guard is None:
            self.released.begin(None)
        else:
            if self.state.global_step + 1 in self.new_data_from:
                self.guard.forget()
            self.loss_of_step = loss.detach().float()
            self.skip, self.spikes = self.guard.decide(
                torch.stack((self.loss_of_step, torch.zeros_like(self.loss_of_step)))
            )
            self.released.begin(self.skip)
        self.backward_pass(loss, **options)

    def note_released(self, released: ReleasedGradients) -> None:
        """Send the verdict to the host."""
        if self.guard is None:
            return
        norm = released.norm().to(self.loss_of_step.device)
        self.guard.learn_norm(norm, skipped=self.skip)
        figures = torch.stack((self.loss_of_step, norm))
        self.guard.note(self.state.global_step + 1, torch.cat((figures, self.spikes.float())))
        left_out = self.skip | ~norm.isfinite()
        self._tr_loss.copy_(torch.where(left_out, self.loss_before, self.loss_before + self._tr_loss))

    # --- its end -----------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """Before anything is logged, measured or saved, all steps so far are known to be good."""
        control = self.control
        every = self.recipe.checkpoints.weights_every_steps
        saves = control.should_save or (every is not None and self.state.global_step % every == 0)
        needs_all = saves or control.should_log or control.should_evaluate or control.should_training_stop
        self.read_verdicts(unread=0 if needs_all else STEPS_BEHIND)
        self.steps_to_log = self.state.global_step - self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*arguments, **options)
        if self._globalstep_last_logged == self.state.global_step:
            self._tr_loss.zero_()  # the Trainer subtracts it from itself, and what is not finite would stay
            self.skipped_since_log = []

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """The mean loss is that of the steps that counted; where none did, that of the last one."""
        if "loss" in logs and self.skipped_since_log:
            counted = self.steps_to_log - len(self.skipped_since_log)
            logs["loss"] = (
                logs["loss"] * self.steps_to_log / counted if counted > 0 else self.skipped_since_log[-1].loss
            )
            logs["skipped_steps"] = len(self.skipped_since_log)
        super().log(logs, *arguments, **options)

    # --- skipped steps -----------------------------------------------------------------------------------------------

    def read_verdicts(self, *, unread: int) -> None:
        """Count the verdicts that have arrived; see `roll_back` for what too many skipped steps raise."""
        if self.guard is None or self.budget is None:
            return
        for judged in self.guard.read(unread=unread):
            self.note_verdict(judged)
            if self.budget.is_exhausted:
                self.roll_back(self.guard, self.budget)

    def note_verdict(self, judged: Judged) -> None:
        """Count and record a step that was skipped."""
        assert self.budget is not None
        if self.args.fp16 and math.isfinite(judged.loss) and not math.isfinite(judged.gradient_norm):
            return  # the scaler is looking for its scale
        skipped = self.budget.note(judged)
        if skipped is not None:
            self.skipped_since_log.append(judged)
            first, end = skipped.rows
            self.record(
                "spike_skipped" if judged.is_finite else "nan_skipped",
                f"Step {judged.step} was skipped: {judged.complaint()}. Its rows are {first:,} to {end - 1:,}.",
                step=judged.step,
                rows=[first, end],
                loss=str(judged.loss),
                gradient_norm=str(judged.gradient_norm),
            )

    def roll_back(self, guard: LossGuard, budget: SkipBudget) -> None:
        """Restart from the last sound checkpoint before the skipped steps, without their rows.

        Without such a checkpoint the run continues: the skipped updates never changed its weights.

        Raises:
            RestartNeeded: there is one.
            Interrupted: there is one, and the run was asked to stop.
            TrainingError: the run went back often enough.
        """
        if budget.rollbacks >= guard.rollbacks:
            steps = ", ".join(str(skipped.step) for skipped in budget.recent)
            newest = published_checkpoints(self.run_folder)
            saved = f"The newest checkpoint is {newest[-1]}." if newest else "Nothing is saved."
            raise TrainingError(
                f"the training diverged: steps {steps} had to be skipped, after {budget.rollbacks} roll-back(s)"
                f" ({budget.total} skipped steps in all; events.jsonl has their rows). {saved} Lower"
                " `optimizer.learning_rate`, look at the data of these rows, or allow more: `safety.loss_guard.skips`,"
                " `rollbacks`."
            )
        bad = budget.roll_back()
        self.wait_for_saves()
        checkpoint = main_process_decides(lambda: newest_sound(self.run_folder, up_to=bad[0].step - 1))
        steps = ", ".join(str(skipped.step) for skipped in bad)
        what = "continues, because no checkpoint is older"
        if checkpoint is not None:
            what = f"resumes from {checkpoint.name} without their rows"
        message = (
            f"{len(bad)} of the last {budget.window} steps were skipped ({steps}): the run {what} (roll-back"
            f" {budget.rollbacks} of {guard.rollbacks})."
        )
        self.record(
            "rolled_back",
            message,
            step=bad[-1].step,
            to_step=None if checkpoint is None else step_of(checkpoint),
            left_out=[skipped.rows for skipped in bad],
            rollbacks=budget.rollbacks,
        )
        if checkpoint is None:
            return
        self.rows_of_steps.leave_out(skipped.rows for skipped in bad)
        main_process_decides(lambda: self.prepare_rollback(checkpoint, budget))
        if self.control.should_training_stop and self.state.global_step < self.state.max_steps:
            raise Interrupted(f"{message} {same_command()} continues.")
        raise RestartNeeded(message)

    def prepare_rollback(self, checkpoint: Path, budget: SkipBudget) -> None:
        """Leave the next start what it needs, and no later checkpoint."""
        remember_rollback(self.run_folder, step_of(checkpoint), self.rows_of_steps.left_out, budget.state())
        later = [path for path in published_checkpoints(self.run_folder) if step_of(path) > step_of(checkpoint)]
        set_aside(self.run_folder, later, f"the run went back to {checkpoint.name}")

    # --- out of memory -----------------------------------------------------------------------------------------------

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]
        """The Trainer's loop; out of memory ends it with a restart in smaller micro-batches."""
        restart: RestartNeeded | None = None
        try:
            super()._run_epoch(**options)
        except RuntimeError as problem:
            if not is_out_of_memory(problem):
                self.refuse_smaller_others(problem)
                raise
            restart = self.learn_smaller_batch(problem)
        if restart is not None:  # outside `except`, where no error holds the tensors of its frames any more
            self.save_finished_steps()
            raise restart

    def learn_smaller_batch(self, problem: RuntimeError) -> RestartNeeded:
        """Let the next start halve the micro-batch and double the accumulation: the same rows in each step.

        Raises:
            ResourceError: one row is all there is, or the recipe does not allow it.
        """
        arguments, step = self.args, self.state.global_step + 1
        before = arguments.per_device_train_batch_size
        size = smaller_micro_batch(before) if self.recipe.safety.on_oom == "split_batch" else None
        if size is None or self.released is not None:
            raise ResourceError(self.too_little_memory(step)) from problem
        remember_micro_batch(self.run_folder, arguments.world_size, size)
        message = (
            f"Out of memory in step {step} on process {rank()} with micro-batches of {before}: the run restarts with"
            f" micro-batches of {size}."
        )
        record_event(
            self.run_folder, "out_of_memory", message, step=step, micro_batch=size, before=before, restart=True
        )
        return RestartNeeded(message)

    def save_finished_steps(self) -> None:
        """Save the steps since the last checkpoint, where this process alone can: the others wait in a collective."""
        model: Any = self.model
        newest = max(map(step_of, published_checkpoints(self.run_folder)), default=0)
        alone = self.args.world_size == 1 and not (self.is_deepspeed_enabled or self.is_fsdp_enabled)
        if alone and not self.is_updating and self.state.global_step > newest:
            model.zero_grad()
            gc.collect()
            clear_device_cache()
            self.save_once("full")
            self.wait_for_saves()

    def refuse_smaller_others(self, problem: RuntimeError) -> None:
        """Raise RestartNeeded where the error comes from another process that ran out of memory."""
        arguments = self.args
        learned = learned_micro_batch(self.run_folder, arguments.world_size)
        if arguments.world_size > 1 and learned is not None and learned < arguments.per_device_train_batch_size:
            raise RestartNeeded(
                f"Another process ran out of memory in step {self.state.global_step + 1}: the run restarts with"
                f" micro-batches of {learned} from its last checkpoint."
            ) from problem

    def too_little_memory(self, step: int) -> str:
        size, length = self.args.per_device_train_batch_size, self.recipe.data.sequence_length
        where = f"out of memory in step {step} with micro-batches of {size} row(s) of {length:,} tokens"
        smaller = f"`training.per_device_train_batch_size: {size // 2}`"
        if size == 1:
            smaller = "`data.sequence_length` lower"
        if self.released is not None:
            return (
                f"{where}, and `optimizer.release_gradients` cannot split a step. Write {smaller}, which makes smaller"
                " steps, or `release_gradients: false`."
            )
        if size > 1:
            return f"{where}, and `safety.on_oom` is abort. Write {smaller}, or `safety.on_oom: split_batch`."
        return (
            f"{where}. Set `training.gradient_checkpointing: true`, `data.sequence_length` lower, or take a DeepSpeed"
            " profile that offloads."
        )


def read_safety(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint stores of skipped steps; empty if another program wrote it."""
    path = checkpoint / SAFETY
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content
