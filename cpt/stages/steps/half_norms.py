"""Clipping of gradients in half precision, or in parts, by their norm in fp32."""

from typing import Any

import torch
from torch import nn
from transformers import Trainer

from cpt.optim.clipping import clip_gradients, gradient_norm

HALF = (torch.bfloat16, torch.float16)


class HalfNorms(Trainer):
    """The Trainer's clipping, exact for weights in half precision, and of FSDP's parts a plain tensor; all else is left to it."""

    def own_gradients(self, model: nn.Module) -> list[torch.Tensor]:
        """All gradients, where some are in half precision or parts of larger ones, and nobody else clips or scales them."""
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
