"""One step: count its loss, clip and check its gradients, and let the optimizer update unless the step is bad."""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.deepspeed import DeepSpeedEngineWrapper
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from cpt.deepspeed_internals import replace_norms_of_groups
from cpt.hf_internals import loss_since_log
from cpt.optim.gradients import ReleasedGradients, clip_gradients, gradient_norm
from cpt.torch_internals import reads_scale
from cpt.training.callbacks import LAST
from cpt.training.engine import HALF, Engine
from cpt.training.guards import StepGuard

log = logging.getLogger("cpt")
MetricsCheck = Callable[[torch.Tensor], torch.Tensor]
"""[2], loss and gradient norm -> whether to skip the update."""


class CheckedStep(TrainerCallback):
    """Measures and clips the gradients of each step, and skips the update of a bad one.

    With `optimizer.release_gradients` updates happen in the backward pass, so a step is checked only by its loss: the
    gradient norm is known afterwards.

    It is the last callback, so that it checks the gradients that the optimizer uses.

    Args:
        metrics_to_check: from a step's loss and gradient norm, [2], what the guard checks.
        finish: called at the end of each step, after the other callbacks.
        releases_gradients: as the recipe says.
    """

    order = LAST

    def __init__(
        self,
        trainer: Trainer,
        guard: StepGuard,
        engine: Engine,
        *,
        metrics_to_check: Callable[[torch.Tensor], torch.Tensor],
        finish: Callable[[TrainerControl], None],
        releases_gradients: bool,
    ) -> None:
        self.trainer = trainer
        self.guard = guard
        self.engine = engine
        self.metrics_to_check = metrics_to_check
        self.finish = finish
        self.releases_gradients = releases_gradients
        self.released: ReleasedGradients | None = None  # during training
        self.is_updating = False  # the optimizer may have changed weights
        self.last_logged_step = 0
        self.clip_by_accelerate = trainer.accelerator.clip_grad_norm_
        trainer.accelerator.clip_grad_norm_ = self.clip_or_measure  # type: ignore[method-assign]

    # --- training begins and ends ------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Take the places of a step's checks, after everything is built and loaded."""
        self.last_logged_step = state.global_step
        self.guard.skipped_since_log.clear()
        self.engine.reshard()  # else FSDP2's modules may list gathered parameters, which get no gradients
        accelerator: Any = self.trainer.accelerator
        model: Any = self.trainer.model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.trainer.is_deepspeed_enabled and self.guard.detector is not None:
            wrapped = accelerator.deepspeed_engine_wrapped
            if not isinstance(wrapped, GuardedEngine):
                accelerator.deepspeed_engine_wrapped = GuardedEngine(
                    wrapped.engine, self.check_metrics, scales_loss=args.fp16
                )
        if self.releases_gradients and self.released is None:
            optimizer: Any = self.trainer.optimizer
            self.released = ReleasedGradients(optimizer.optimizer)
            self.backward_pass = accelerator.backward
            accelerator.backward = self.update_in_backward

    def remove(self) -> None:
        """Undo what released gradients changed."""
        if self.released is not None:
            self.released.remove()
            self.released = None
            del self.trainer.accelerator.backward

    # --- the loss that is logged -------------------------------------------------------------------------------------

    @property
    def loss(self) -> torch.Tensor:
        """The Trainer's sum of losses since the last log, to which it adds in place."""
        return loss_since_log(self.trainer)

    def begin(self) -> None:
        """Start summing the loss of this step's micro-batches separately."""
        self.is_updating = False
        self.start_next_mean()
        self.loss_before = self.loss.clone()
        if self.guard.detector is not None:
            self.loss.zero_()
            self.loss_is_lost = torch.zeros_like(self.loss_before, dtype=torch.bool)

    def count_loss(self, skip: torch.Tensor) -> None:
        """Add this step's loss to the sum since the last log, unless the step is skipped."""
        self.loss.copy_(torch.where(skip, self.loss_before, self.loss_before + self.loss))

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.start_next_mean()

    def start_next_mean(self) -> None:
        if self.last_logged_step == self.trainer.state.global_step:
            # The Trainer resets it by subtraction, which would keep NaN.
            self.loss.zero_()
            self.guard.skipped_since_log.clear()

    def correct_loss(self, logs: dict[str, float]) -> None:
        """Log the mean loss of the accepted steps; without any, the loss of the last step."""
        if "loss" not in logs:
            return
        step = self.trainer.state.global_step
        num_steps = step - self.last_logged_step
        self.last_logged_step = step
        skipped = self.guard.skipped_since_log
        if not skipped:
            return
        accepted = num_steps - len(skipped)
        if accepted > 0:
            logs["loss"] *= num_steps / accepted
        else:
            logs["loss"] = skipped[-1].loss
        logs["skipped_steps"] = len(skipped)

    # --- gradients ---------------------------------------------------------------------------------------------------

    def clip_or_measure(self, parameters: Any, max_norm: float, *_: Any, **__: Any) -> Any:
        """Replaces accelerate's clipping: the gradient norm is checked before it is used, on the device."""
        if self.released is not None:
            return self.released.norm()
        if self.trainer.is_deepspeed_enabled:
            return self.clip_by_accelerate(parameters, max_norm)
        return self.norm_of_step()

    def norm_of_step(self) -> torch.Tensor:
        """The gradient norm for the Trainer's log: a placeholder that the check fills in, because clipping waits."""
        if self.guard.detector is None:
            return self.measure_norm()
        self.norm = torch.zeros((), device=self.trainer.args.device)
        return self.norm

    def measure_norm(self) -> torch.Tensor:
        """Clip the gradients to `training.max_grad_norm` if positive; return the norm before clipping."""
        trainer = self.trainer
        max_norm = trainer.args.max_grad_norm
        kernel = self.kernel_of_optimizer()
        if kernel is not None:  # it divides gradients by a device scalar, without another pass
            norm = gradient_norm(
                [parameter.grad for parameter in self.trained if parameter.grad is not None]
            )
            if max_norm > 0:
                # torch's clipping divides by the same
                kernel.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1)
            return norm
        model: Any = trainer.model_wrapped
        if trainer.accelerator.scaler is None:
            gradients = []
            for parameter in model.parameters():
                if parameter.grad is not None:
                    gradients.append(parameter.grad)
            is_half = any(gradient.dtype in HALF for gradient in gradients)
            # torch's norm would be rounded for half precision or shards
            if gradients and (trainer.is_fsdp_enabled or is_half):
                if max_norm > 0:
                    return clip_gradients(gradients, max_norm)
                return gradient_norm(gradients)
        return self.clip_by_accelerate(  # type: ignore[return-value]
            model.parameters(), max_norm if max_norm > 0 else math.inf
        )

    def kernel_of_optimizer(self) -> Any:
        """The optimizer, if its kernel reads `grad_scale` and `found_inf` from the device; else None."""
        optimizer: Any = self.trainer.optimizer
        if self.trainer.accelerator.scaler is None and reads_scale(optimizer.optimizer):
            return optimizer.optimizer
        return None

    # --- the check ---------------------------------------------------------------------------------------------------

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Clip and check the complete gradients; skip the update of a bad step. DeepSpeed has already used them."""
        self.is_updating = True
        detector = self.guard.detector
        if detector is None:
            return
        if self.released is not None:
            norm = self.released.norm().to(self.loss_of_step.device)
            detector.learn_norm(norm, skipped=self.skip)
            metrics = torch.stack((self.loss_of_step, norm))
            detector.note(state.global_step + 1, torch.cat((metrics, self.spikes.float())))
            self.count_loss(self.skip | ~norm.isfinite())
            return
        if self.trainer.is_deepspeed_enabled:
            self.count_loss(self.loss_is_lost)
            return
        self.norm.copy_(self.measure_norm())
        metrics = torch.stack((self.loss, self.norm))  # [2]
        if args.world_size > 1:
            dist.all_reduce(metrics)
            metrics /= args.world_size
        skip = self.check_metrics(metrics)
        self.count_loss(self.loss_is_lost)
        kernel = self.kernel_of_optimizer()
        if kernel is not None:
            kernel.found_inf = skip.float()
            return
        # Only here the host waits: this optimizer does not read a flag from the device.
        loss_value, norm_value = metrics.tolist()
        # fp16's scaler skips steps with infinite gradients, and lowers its scale.
        has_scaler = self.trainer.accelerator.scaler is not None
        scale_is_too_large = (
            has_scaler and math.isfinite(loss_value) and not math.isfinite(norm_value)
        )
        if bool(skip) and not scale_is_too_large:
            # accelerate then skips the optimizer step
            self.trainer.accelerator.sync_gradients = False  # type: ignore[misc]

    def check_metrics(self, metrics: torch.Tensor) -> torch.Tensor:
        """Return whether to skip the current step, on the device; `metrics`: [2], loss and gradient norm."""
        detector = self.guard.detector
        assert detector is not None, "steps are only checked with a guard"
        step = self.trainer.state.global_step + 1
        self.guard.begin_step(step)
        metrics = self.metrics_to_check(metrics)
        skip = detector.check(step, metrics)
        loss_is_finite, norm_is_finite = metrics.isfinite()
        # not a skipped step, but a step that fp16's scaler repeats with a smaller scale
        scale_is_too_large = loss_is_finite & ~norm_is_finite & self.trainer.args.fp16
        self.loss_is_lost.copy_(skip & ~scale_is_too_large)
        return skip

    def update_in_backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Run the backward pass, which updates the weights; the loss is checked before, on the device."""
        assert self.released is not None, "only replaces backward with released gradients"
        self.is_updating = True  # from here on the step cannot be redone
        detector = self.guard.detector
        if detector is None:
            self.released.begin(None)
        else:
            self.guard.begin_step(self.trainer.state.global_step + 1)
            self.loss_of_step = loss.detach().float()
            unknown_norm = torch.zeros_like(self.loss_of_step)
            self.skip, self.spikes = detector.decide(torch.stack((self.loss_of_step, unknown_norm)))
            self.released.begin(self.skip)
        self.backward_pass(loss, **options)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.finish(control)


class GuardedEngine(DeepSpeedEngineWrapper):
    """accelerate's wrapper of the engine, with a check before the update.

    Args:
        check: called once per step, with the same values on all ranks.
        scales_loss: fp16, whose gradients may be infinite until the loss scale is found; the schedule then waits, as
            without a guard.
    """

    def __init__(self, engine: Any, check: MetricsCheck, *, scales_loss: bool) -> None:
        from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
        from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

        super().__init__(engine)
        self.check = check
        self.scales_loss = scales_loss
        self.loss: torch.Tensor | None = None  # sum over the step's micro-batches so far
        self.has_checked = False
        self.knows_norms = True
        optimizer: Any = engine.optimizer
        if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
            self.norms_of_groups = replace_norms_of_groups(optimizer, self.checked_norms)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            self.norm_of_all = optimizer.scaled_global_norm
            optimizer.scaled_global_norm = self.checked_norm
            optimizer.check_grad_overflow = True  # a profile may disable skipping
        else:
            self.knows_norms = False
            log.warning(
                f"safety.loss_guard: DeepSpeed's {type(optimizer).__name__} cannot skip a step. ZeRO-2 and 3 can."
            )

    def backward(self, loss: torch.Tensor, sync_gradients: bool = True, **options: Any) -> None:
        """As in accelerate, the last micro-batch also updates."""
        detached = loss.detach().float()
        self.loss = detached if self.loss is None else self.loss + detached
        super().backward(loss, sync_gradients=sync_gradients, **options)
        if sync_gradients and self.knows_norms:
            if not self.has_checked:  # DeepSpeed skipped the step before it computed the norm
                self.skips(torch.full((), math.inf, device=self.loss.device))
            self.has_checked = False
            self.loss = None
            if not self.scales_loss:  # the schedule advances
                self.engine.optimizer.overflow = False

    def checked_norm(self) -> torch.Tensor:
        norm: torch.Tensor = self.norm_of_all()
        skip = self.skips(norm).to(norm.device)  # the CPU, if the optimizer is offloaded
        return torch.where(skip, torch.full_like(norm, math.inf), norm)

    def checked_norms(self) -> list[torch.Tensor]:
        assert self.loss is not None, "a step has micro-batches"
        norms = list(map(torch.as_tensor, self.norms_of_groups()))
        together = torch.stack([norm.float() for norm in norms]).to(self.loss.device)
        total_norm = torch.linalg.vector_norm(together)
        # -1 means a non-finite norm
        skip = self.skips(
            torch.where((together < 0).any(), torch.full_like(total_norm, math.inf), total_norm)
        )
        # DeepSpeed multiplies gradients by what it gets back: on the device that it chose, the CPU with offload.
        skip = skip.to(norms[0].device)
        return [torch.where(skip, torch.full_like(norm, math.inf), norm) for norm in norms]

    def skips(self, scaled_norm: torch.Tensor) -> torch.Tensor:
        """Whether to skip the step, by its norm and the mean loss of all ranks."""
        assert self.loss is not None, "a step has micro-batches"
        self.has_checked = True
        loss = self.loss.clone()
        dist.all_reduce(loss)
        norm = scaled_norm.float() / self.engine.optimizer.loss_scale
        return self.check(torch.stack((loss / dist.get_world_size(), norm.to(loss.device))))
