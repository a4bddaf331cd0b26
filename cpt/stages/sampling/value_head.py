"""What a state is worth, as a linear function of the policy's last hidden state; and what PPO makes of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import nn

NAME = "value_head"


class ValueHead(nn.Linear):
    """A part of the model that training sees, and saving leaves out.

    Adam's steps do not depend on how large gradients are: values that are `speed` times what the layer says move that
    much faster.
    """

    def __init__(self, width: int, *, speed: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(width, 1, dtype=dtype, device=device)
        nn.init.zeros_(self.weight)  # nothing is known yet: the first advantages are the rewards
        nn.init.zeros_(self.bias)
        self.speed = speed
        self.heard: list[torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values [B, T] of states [B, T, width]."""
        values: torch.Tensor = self.speed * super().forward(hidden.to(self.weight.dtype)).squeeze(-1)
        return values

    @classmethod
    def on(cls, model: Any, *, speed: float) -> "ValueHead":
        """Give a model one, in the type of what is trained."""
        whole: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        head = cls(whole.config.get_text_config().hidden_size, speed=speed, dtype=trained.dtype, device=trained.device)
        setattr(model, NAME, head)
        model._keys_to_ignore_on_save = {
            *(model._keys_to_ignore_on_save or ()),
            *(f"{NAME}.{name}" for name in head.state_dict()),
        }
        whole.base_model.register_forward_hook(head.listen)
        return head

    def listen(self, _: nn.Module, __: Any, output: Any) -> None:
        """Where somebody wants values, tell those of the states that the backbone comes to."""
        if self.heard is not None:
            self.heard.append(self(output.last_hidden_state))

    @contextmanager
    def listening(self) -> Iterator[list[torch.Tensor]]:
        """While it is open, values [B, T] of each forward pass of the model."""
        heard: list[torch.Tensor] = []
        self.heard = heard
        try:
            yield heard
        finally:
            self.heard = None


def estimate_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> torch.Tensor:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16).

    Args:
        rewards: [B], each given at a completion's last token, where it ends.
        values: [B, T], of the state before each token.
        mask: [B, T], 1 for tokens of the completion, which come first; 0 for padding.

    Returns:
        [B, T], 0 at padding.
    """
    later = torch.zeros_like(rewards)  # advantage and value of what comes behind; nothing comes behind the end
    value_later = torch.zeros_like(rewards)
    is_later = torch.zeros_like(rewards)
    advantages = torch.zeros_like(values)
    for place in reversed(range(values.size(1))):
        is_token = mask[:, place]
        reward = rewards * is_token * (1 - is_later)
        delta = reward + gamma * value_later - values[:, place]
        later = (delta + gamma * lam * later) * is_token
        advantages[:, place] = later
        value_later, is_later = values[:, place] * is_token, is_token
    return advantages


def clipped_value_loss(values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """Half the squared error of each value; one that moved further than `clip` from what it was gains nothing by
    moving on."""
    moved = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (moved - returns).square())
