"""Steps whose updates are made in the backward pass: judged by their loss before it, as the gradient's norm is only
known after."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cpt.errors import ResourceError
from cpt.optim.released import ReleasedGradients, check_release, releases_gradients
from cpt.stages.steps.guarded import GuardedSteps
from cpt.stages.steps.half_norms import HalfNorms


class ReleasedSteps(GuardedSteps, HalfNorms):
    """The guarded loop, for recipes with `optimizer.release_gradients`; any other passes through unchanged."""

    released: ReleasedGradients | None = None
    skip: torch.Tensor
    spikes: torch.Tensor
    loss_of_step: torch.Tensor
    backward_pass: Callable[..., None]

    def train(self, *arguments: Any, **options: Any) -> Any:
        """As ever; the model keeps no hooks behind."""
        check_release(self.recipe, deepspeed=self.is_deepspeed_enabled)
        accelerator: Any = self.accelerator
        try:
            return super().train(*arguments, **options)
        finally:
            if self.released is not None:
                self.released.remove()
                self.released = None
                del accelerator.backward

    def begin_guarding(self) -> None:
        """Everything is built and loaded."""
        super().begin_guarding()
        if releases_gradients(self.recipe) and self.released is None:
            wrapper: Any = self.optimizer
            self.released = ReleasedGradients(wrapper.optimizer)
            accelerator: Any = self.accelerator
            self.backward_pass = accelerator.backward
            accelerator.backward = self.update_backward

    def update_backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The backward pass, in which the weights are updated; its loss is the last that can be judged before."""
        assert self.released is not None, "in place of the accelerator's only then"
        self.begin_updates(self.released, loss.detach())
        self.backward_pass(loss, **options)

    def begin_updates(self, released: ReleasedGradients, loss: torch.Tensor) -> None:
        """Judge the step by its loss; the verdict stays on the device."""
        self.is_updating = True  # from here on the step cannot be redone
        if self.guard is None:
            released.begin(None)
            return
        if self.state.global_step + 1 in self.new_data_from:
            self.guard.forget()
        self.loss_of_step = loss.float()
        self.skip, self.spikes = self.guard.decide(
            torch.stack((self.loss_of_step, torch.zeros_like(self.loss_of_step)))
        )
        released.begin(self.skip)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """What was dropped had a norm all the same."""
        return super()._get_grad_norm(model, grad_norm) if self.released is None else self.released.norm()

    def judge_step(self) -> None:
        """Tell the host of the step; where a gradient was not finite, the parameters that it belongs to were left
        out."""
        if self.released is None:
            super().judge_step()
        elif self.guard is not None:
            norm = self.released.norm().to(self.loss_of_step.device)
            self.guard.learn_norm(norm, skipped=self.skip)
            self.guard.note(
                self.state.global_step + 1, torch.cat((torch.stack((self.loss_of_step, norm)), self.spikes.float()))
            )
            left_out = self.skip | ~norm.isfinite()
            self._tr_loss.copy_(torch.where(left_out, self.loss_before, self.loss_before + self._tr_loss))

    def make_smaller(self, problem: RuntimeError) -> None:
        """Smaller micro-batches would have to add up their gradients.

        Raises:
            ResourceError: with what helps.
        """
        if self.released is None:
            super().make_smaller(problem)
            return
        size, length = self.args.per_device_train_batch_size, self.recipe.data.sequence_length
        fewer = (
            f"`training.per_device_train_batch_size: {size // 2}`"
            if size > 1
            else f"`data.sequence_length` below {length}"
        )
        raise ResourceError(
            f"out of memory in step {self.state.global_step + 1} with micro-batches of {size}, and"
            f" `optimizer.release_gradients` splits no step: gradients that are dropped do not add up. Write {fewer},"
            " which makes smaller steps, or `release_gradients: false`. The run goes on from its last checkpoint."
        ) from problem
