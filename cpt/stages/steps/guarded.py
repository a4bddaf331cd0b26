"""Steps that cannot ruin a run: judged before their update, skipped or taken back when bad, made in smaller parts
where memory ends.

A skipped step costs its rows. After too many the run goes back to the last sound checkpoint from before them and
leaves their rows out. Both that and smaller micro-batches begin the Trainer's loop anew at a step's boundary, inside
the same process.
"""

import gc
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.memory import clear_device_cache
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from cpt.models.inventory import vocabulary_size
from cpt.optim.clipping import gradient_norm
from cpt.optim.schedules import phases_in_tokens
from cpt.safety.judging_engine import JudgingEngine
from cpt.safety.loss_guard import HIGHEST_LOSS, STEPS_BEHIND, LossGuard
from cpt.safety.out_of_memory import is_out_of_memory
from cpt.safety.skip_budget import SkipBudget
from cpt.stages.steps.rolling_back import RollBack, RollingBack, read_safety
from cpt.stages.steps.smaller_batches import SmallerBatches

OF_LANGUAGE_MODELS = ("pretrain", "cpt", "sft")


class LastWord(TrainerCallback):
    """Runs after every other callback: what it judges is what the optimizer gets."""

    def __init__(self, trainer: "GuardedSteps") -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Everything is built and loaded."""
        self.trainer.begin_guarding()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The gradients are complete; under DeepSpeed they are used already."""
        self.trainer.judge_step()


class GuardedSteps(RollingBack, SmallerBatches):
    """The Trainer's loop with a loss guard, roll-back and smaller micro-batches."""

    first_step: int
    new_data_from: set[int]
    """Steps at which a phase of the data begins."""

    def train(self, resume_from_checkpoint: str | Path | None = None, **options: Any) -> TrainOutput:  # type: ignore[override]
        """As the Trainer does, with what the checkpoint knows of skipped steps."""
        section = self.recipe.safety.loss_guard
        if section is not None:
            self.guard = LossGuard(section, self.args.device, self.highest_loss())
            self.budget = SkipBudget(self.rows_of_steps, self.guard.window, self.guard.skips)
        if resume_from_checkpoint is not None:
            self.restore_safety(read_safety(Path(resume_from_checkpoint)))
        until = [phase.until for phase in phases_in_tokens(self.recipe).phases[:-1]]
        self.new_data_from = {tokens // self.length.tokens_per_step + 1 for tokens in until if tokens is not None}
        self.skipped_since_log = []
        self.remove_callback(LastWord)
        self.add_callback(LastWord(self))  # behind those that were added since
        return super().train(resume_from_checkpoint, **options)  # type: ignore[arg-type]

    def highest_loss(self) -> float:
        """Of a language model's own loss, which starts near that of a uniform guess; the other stages have losses
        without such a scale."""
        if self.recipe.stage not in OF_LANGUAGE_MODELS:
            return math.inf
        model: Any = self.model
        return HIGHEST_LOSS * math.log(vocabulary_size(model.config))

    def begin_guarding(self) -> None:
        """Take the places from which a step can be judged."""
        self.open_vote()
        self.reshard()
        model: Any = self.model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        accelerator: Any = self.accelerator
        if (
            self.is_deepspeed_enabled
            and self.guard is not None
            and not isinstance(accelerator.deepspeed_engine_wrapped, JudgingEngine)
        ):
            engine = accelerator.deepspeed_engine_wrapped.engine
            accelerator.deepspeed_engine_wrapped = JudgingEngine(
                engine, self.judge_figures, scales_loss=self.args.fp16
            )

    # --- a step ------------------------------------------------------------------------------------------------------

    @property
    def judges_gradients(self) -> bool:
        """True where the gradients are whole before the optimizer's step: everywhere but under DeepSpeed."""
        return self.guard is not None and not self.is_deepspeed_enabled

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """A step begins: what its micro-batches lose is added up by itself."""
        self.begin_step()
        self.loss_before = self._tr_loss.clone()
        if self.judges_gradients:
            self._tr_loss.zero_()
        return super().get_batch_samples(*arguments, **options)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Clipping waits for the last word; the norm that is logged is filled in then."""
        if self.is_deepspeed_enabled:
            return super()._clip_grad_norm(model)
        if self.guard is None:
            return self.measure_norm()
        self.norm = torch.zeros((), device=self.args.device)
        return self.norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The same without clipping."""
        if self.is_deepspeed_enabled:
            return super()._get_grad_norm(model, grad_norm)
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def judge_step(self) -> None:
        """Clip, judge, and have the update left out where the step is bad."""
        self.is_updating = True
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
        """The norm of all gradients before they are clipped, and have them clipped.

        Where the optimizer's kernel divides gradients by a number of the device, they are not written twice.
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
        """The optimizer, if its kernel looks at the device for what to divide by and whether to skip; None for all
        others."""
        wrapper: Any = self.optimizer
        kernel = wrapper.optimizer
        looks = self.accelerator.scaler is None and vars(kernel).get("_step_supports_amp_scaling", False)
        return kernel if looks and not self.is_fsdp_enabled else None

    def judge_figures(self, figures: torch.Tensor) -> torch.Tensor:
        """Whether the step that is being made has to be skipped."""
        assert self.guard is not None
        step = self.state.global_step + 1
        if step in self.new_data_from:  # a phase's data may have a loss of another level
            self.guard.forget()
        return self.guard.judge(step, figures)

    def skip_update(self, skip: torch.Tensor, figures: torch.Tensor) -> None:
        """Where the optimizer's kernel looks at a flag of the device, nobody waits; with any other optimizer the host
        has to ask."""
        kernel, scaler = self.kernel_of_optimizer(), self.accelerator.scaler
        if kernel is not None:
            kernel.found_inf = skip.float()
            return
        loss, norm = figures.tolist()
        scale_is_too_large = (
            scaler is not None and math.isfinite(loss) and not math.isfinite(norm)
        )  # the scaler skips and lowers it
        if bool(skip) and not scale_is_too_large:
            self.accelerator.gradient_state._set_sync_gradients(
                False
            )  # accelerate's optimizer only steps with gradients of all ranks

    # --- its end -----------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *arguments: Any, **options: Any) -> None:
        """Before anything is logged, measured or kept, all steps so far are known to be good."""
        control = self.control
        every = self.recipe.checkpoints.weights_every_steps
        saves = control.should_save or (every is not None and self.state.global_step % every == 0)
        settles = saves or control.should_log or control.should_evaluate or control.should_training_stop
        self.settle(unread=0 if settles else STEPS_BEHIND)
        self.steps_to_log = self.state.global_step - self._globalstep_last_logged
        super()._maybe_log_save_evaluate(*arguments, **options)
        if self._globalstep_last_logged == self.state.global_step:
            self._tr_loss.zero_()  # the Trainer subtracts it from itself, and what is not finite would stay
            self.skipped_since_log = []

    def log(self, logs: dict[str, float], *arguments: Any, **options: Any) -> None:
        """The mean loss is that of the steps that counted; where none did, what the last one had."""
        if "loss" in logs and self.skipped_since_log:
            counted = self.steps_to_log - len(self.skipped_since_log)
            logs["loss"] = (
                logs["loss"] * self.steps_to_log / counted if counted > 0 else self.skipped_since_log[-1].loss
            )
            logs["skipped_steps"] = len(self.skipped_since_log)
        super().log(logs, *arguments, **options)

    # --- beginning anew at a step's boundary -------------------------------------------------------------------------

    def _run_epoch(self, **options: Any) -> None:  # type: ignore[override]
        """The Trainer's loop; a roll-back or smaller micro-batches begin it anew where the run then stands."""
        while True:
            checkpoint: Path | None = None
            try:
                super()._run_epoch(**options)
                return
            except RollBack as decision:
                checkpoint = decision.checkpoint
            except RuntimeError as problem:
                if not is_out_of_memory(problem):
                    self.refuse_smaller_others(problem)
                    raise
                self.make_smaller(problem)
            # Outside of `except`, where no error holds the tensors of its frames any more.
            if checkpoint is not None:
                self.go_back(checkpoint, num_steps=options["num_update_steps_per_epoch"])
                if self.control.should_training_stop:  # somebody asked for it, and the checkpoint is there already
                    return
            else:
                self.drop_step(options["model"])
            self.begin_anew(options, checkpoint)

    def drop_step(self, model: nn.Module) -> None:
        """Forget what was done of a step."""
        gc.collect()
        clear_device_cache()
        model.zero_grad()
        self._tr_loss.copy_(self.loss_before)

    def begin_anew(self, options: dict[str, Any], checkpoint: Path | None) -> None:
        """What the Trainer's loop needs to begin at the present step."""
        self.first_step = self.state.global_step
        before: Any = self.callback_handler.train_dataloader
        loader: Any = self.get_train_dataloader()
        loader.waited_seconds = before.waited_seconds
        self.callback_handler.train_dataloader = loader
        options |= {
            "train_dataloader": loader,
            "steps_in_epoch": len(loader),
            "resume_from_checkpoint": None if checkpoint is None else str(checkpoint),
            "epochs_trained": options["epoch"],
        }
        self.control = self.callback_handler.on_epoch_begin(self.args, self.state, self.control)
