"""Gradients of weights in half precision: accumulated and reduced in fp32, and clipped by their norm in fp32."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

from cpt.optim.clipping import clip_gradients, gradient_norm
from cpt.optim.one_kernel_adamw import OneKernelAdamW
from cpt.ranks import tell

HALF = (torch.bfloat16, torch.float16)


class HalfNorms(Trainer):
    """The Trainer's clipping, exact for weights in half precision, and of FSDP's parts a plain tensor; all else is
    left to it.

    Gradients of weights in half precision accumulate over the micro-batches of a step in fp32, through torch's
    `grad_dtype`. DDP's buckets have the type of the weights, so DDP cannot reduce them: the processes average the fp32
    gradients themselves after the last micro-batch. A step of one micro-batch accumulates nothing, so its gradients
    stay in half precision, and DDP reduces them.
    """

    accumulates_in_fp32 = False

    def get_batch_samples(self, *arguments: Any, **options: Any) -> Any:
        """The micro-batches of a step: more than before where memory ran out. No gradients exist yet, so that their
        type can change."""
        if not self.accumulates_in_fp32 and self.args.gradient_accumulation_steps > 1:
            self.accumulate_in_fp32()
        return super().get_batch_samples(*arguments, **options)

    def trained_weights(self) -> list[torch.Tensor]:
        """All that the optimizer has."""
        wrapper: Any = self.optimizer
        return [parameter for group in wrapper.param_groups for parameter in group["params"]]

    def accumulate_in_fp32(self) -> None:
        """Only for our own optimizers, which take fp32 gradients of weights in half precision."""
        wrapper: Any = self.optimizer
        sends_buffers = (
            self.args.world_size > 1 and self.args.ddp_broadcast_buffers
        )  # DDP does so only in steps that it reduces
        if sends_buffers or not isinstance(wrapper.optimizer, OneKernelAdamW):
            return
        halves = [weight for weight in self.trained_weights() if weight.dtype in HALF]
        for weight in halves:
            weight.grad_dtype = torch.float32
        self.accumulates_in_fp32 = bool(halves)
        if halves:
            tell(
                "Gradients: accumulated in fp32, because the weights are in half precision and a step has several"
                " micro-batches."
            )

    def training_step(self, model: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        """Forward and backward pass of a micro-batch; after the last one of a step the gradients are those of all
        processes."""
        reduces = self.accumulates_in_fp32 and isinstance(model, DistributedDataParallel)
        if reduces:
            model.require_backward_grad_sync = False
        loss = super().training_step(model, *arguments, **options)
        if reduces and self.accelerator.sync_gradients:
            average_gradients(self.trained_weights(), may_differ=bool(self.args.ddp_find_unused_parameters))
        return loss

    def own_gradients(self, model: nn.Module) -> list[torch.Tensor]:
        """All gradients, where some are in half precision or parts of larger ones, and nobody else clips or scales
        them."""
        if self.is_deepspeed_enabled or self.accelerator.scaler is not None:
            return []
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return gradients if self.is_fsdp_enabled or any(gradient.dtype in HALF for gradient in gradients) else []

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        """Scale them down, and tell the norm before."""
        gradients = self.own_gradients(model)
        return clip_gradients(gradients, self.args.max_grad_norm) if gradients else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm alone, without touching the gradients."""
        gradients = self.own_gradients(model) if grad_norm is None else []
        return gradient_norm(gradients) if gradients else super()._get_grad_norm(model, grad_norm)


def average_gradients(weights: Sequence[torch.Tensor], *, may_differ: bool) -> None:
    """Put the mean over all processes in the place of each gradient.

    Args:
        may_differ: a process may lack gradients that others have: none of its tokens went to that expert.
    """
    if may_differ:
        there = torch.tensor(
            [weight.grad is not None for weight in weights], dtype=torch.int32, device=weights[0].device
        )
        dist.all_reduce(there, op=dist.ReduceOp.MAX)
        for weight, elsewhere in zip(weights, there.tolist(), strict=True):
            if elsewhere and weight.grad is None:
                weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    torch._foreach_div_(gradients, dist.get_world_size())
    for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
        work.wait()
