"""Proximal policy optimization (arXiv 1707.06347): a value head on the policy, generalized advantage estimation, and
both losses clipped.

TRL lacks such a trainer; generation, rewards and the clipped policy loss come from its GRPO. A token's value is a
linear function of the policy's last hidden state, so policy and values share one backbone and one backward pass.
`training.beta` is the weight of the KL divergence to the reference in the loss. The value head is not exported;
checkpoints keep it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from cpt.hf_internals import leave_out_of_saves
from cpt.recipe.schema import Recipe
from cpt.stages.generating import RewardedTrainer, SingleAnswers

NAME = "value_head"


@dataclass
class PPOConfig(SingleAnswers):
    """PPO's keys; each generation is trained on four times."""

    num_iterations: int = 4
    gamma: float = 1.0
    """Discount factor of future rewards."""
    lam: float = 0.95
    """The lambda of generalized advantage estimation (arXiv 1506.02438): 0 trusts the values, 1 the rewards."""
    value_coefficient: float = 0.1
    """Weight of the values' loss relative to the policy's."""
    value_clip: float = 0.2
    """Clip range of a value's change since the generation."""
    value_speed: float = 10.0
    """Learning rate of the values, relative to the policy's."""
    whiten_advantages: bool = True
    """Normalize advantages of a generation to mean 0 and deviation 1, as far as `least_deviation` allows."""


class PPOTrainer(RewardedTrainer):
    """GRPO's loop with a value head and PPO's losses."""

    def __init__(self, recipe: Recipe, model: Any, arguments: PPOConfig, **options: Any) -> None:
        self.head = ValueHead.on(model, speed=arguments.value_speed)
        super().__init__(recipe, model, arguments, **options)

    def forward_completions(self, forward: Callable[[], Any], logits_to_keep: int) -> Any:
        """Run GRPO's forward pass; also store the values of the same states."""
        with self.head.listening() as heard:
            outputs = forward()
        if heard:
            self.values = torch.cat(heard)[
                :, -logits_to_keep - 1 : -1
            ]  # the state before a token predicts its value
        return outputs

    def advantages_of(
        self, inputs: list[dict[str, Any]], outputs: dict[str, Any]
    ) -> dict[str, Any]:
        """Compute advantages by the values before the first step on these completions; rewards are at the end."""
        config = self.args
        self.log_probabilities(outputs)
        values = self.values.float()
        mask = outputs["completion_mask"].float()
        rewards = self.part_of_process(self.rewards_of_all)
        applies = ~rewards.isnan()
        advantages = estimate_advantages(
            rewards.nan_to_num(), values, mask, gamma=config.gamma, lam=config.lam
        )
        advantages = advantages * applies[:, None]
        returns = values + advantages
        # Explained variance of the returns by the values: 1 is all, 0 none.
        mean, _ = self.moments(values, mask)
        _, missed = self.moments(returns - values, mask)
        _, spread = self.moments(returns, mask)
        self.add_metric("value/mean", mean.item())
        if spread > 0:
            self.add_metric("value/explained_variance", 1 - (missed / spread).square().item())
        if config.whiten_advantages:
            mean, deviation = self.moments(advantages, mask * applies[:, None])
            advantages = (
                (advantages - mean)
                / deviation.clamp(min=config.least_deviation)
                * mask
                * applies[:, None]
            )
        return {"advantages": advantages, "values": values, "returns": returns}

    def moments(
        self, numbers: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of unmasked numbers, over all processes."""
        sums = torch.stack(((numbers * mask).sum(), (numbers.square() * mask).sum(), mask.sum()))
        total, squares, count = self.accelerator.reduce(sums, reduction="sum")
        mean = total / count.clamp(min=1)
        return mean, (squares / count.clamp(min=1) - mean.square()).clamp(min=0).sqrt()

    def loss_of_completions(
        self, policy_loss: torch.Tensor, inputs: dict[str, Any]
    ) -> torch.Tensor:
        config = self.args
        losses = clipped_value_loss(
            self.values.float(), inputs["values"], inputs["returns"], config.value_clip
        )
        # Tokens of the whole generation, which spans several steps.
        tokens = inputs["num_items_in_batch"].clamp(min=1) / config.world_size
        share = tokens * self.current_gradient_accumulation_steps / config.steps_per_generation
        value_loss = (losses * inputs["completion_mask"]).sum() / share
        in_log = value_loss.detach() * self.current_gradient_accumulation_steps
        self.add_metric("value/loss", self.accelerator.gather(in_log.reshape(1)).mean().item())
        return policy_loss + config.value_coefficient * value_loss

    def own_state(self) -> dict[str, Any]:
        """Return the head; DeepSpeed's engine saves it with the model."""
        if self.is_deepspeed_enabled:
            return {}
        return {"value_head": self.head.state_dict()}

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.head.load_state_dict(state["value_head"])


class ValueHead(nn.Linear):
    """A part of the model that is trained, but not saved with it.

    Adam's steps do not depend on the scale of gradients: values that are `speed` times the layer's output change
    `speed` times as fast.
    """

    def __init__(
        self, width: int, *, speed: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(width, 1, dtype=dtype, device=device)
        nn.init.zeros_(self.weight)  # values start at 0: the first advantages are the rewards
        nn.init.zeros_(self.bias)
        self.speed = speed
        self.heard: list[torch.Tensor] | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Values [B, T] of states [B, T, width]."""
        return self.speed * super().forward(hidden.to(self.weight.dtype)).squeeze(-1)

    @classmethod
    def on(cls, model: Any, *, speed: float) -> "ValueHead":
        """Attach a value head to a model, in the dtype of trained weights."""
        base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
        trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        head = cls(
            base.config.get_text_config().hidden_size,
            speed=speed,
            dtype=trained.dtype,
            device=trained.device,
        )
        setattr(model, NAME, head)
        leave_out_of_saves(model, {f"{NAME}.{name}" for name in head.state_dict()})
        base.base_model.register_forward_hook(head.listen)
        return head

    def listen(self, _: nn.Module, __: Any, output: Any) -> None:
        """Store the values of the backbone's last states, if requested."""
        if self.heard is not None:
            self.heard.append(self(output.last_hidden_state))

    @contextmanager
    def listening(self) -> Iterator[list[torch.Tensor]]:
        """Collect the values [B, T] of each forward pass of the model."""
        heard: list[torch.Tensor] = []
        self.heard = heard
        try:
            yield heard
        finally:
            self.heard = None


def estimate_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> torch.Tensor:
    """Generalized advantage estimation (arXiv 1506.02438, equation 16).

    Args:
        rewards: [B], given at each completion's last token.
        values: [B, T], of the state before each token.
        mask: [B, T], 1 for tokens of the completion, which come first; 0 for padding.

    Returns:
        [B, T], 0 at padding.
    """
    # Advantage and value of the next token, and its mask; zero past the end.
    advantage = torch.zeros_like(rewards)
    next_value = torch.zeros_like(rewards)
    next_mask = torch.zeros_like(rewards)
    advantages = torch.zeros_like(values)
    for position in reversed(range(values.size(1))):
        token_mask = mask[:, position]
        value = values[:, position]
        reward = rewards * token_mask * (1 - next_mask)
        delta = reward + gamma * next_value - value
        advantage = (delta + gamma * lam * advantage) * token_mask
        advantages[:, position] = advantage
        next_value = value * token_mask
        next_mask = token_mask
    return advantages


def clipped_value_loss(
    values: torch.Tensor, before: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """Half the squared error of each value; beyond a change of `clip`, the gradient is zero."""
    moved = before + (values - before).clamp(-clip, clip)
    return 0.5 * torch.maximum((values - returns).square(), (moved - returns).square())
