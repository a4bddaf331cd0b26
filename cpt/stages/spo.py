"""Single-stream policy optimisation (arXiv 2509.13232): one answer to a prompt, compared with what the prompt's
answers were worth before.

The paper's: the value tracker, the advantage (reward less the value before this answer, normalised over the whole
batch) and the clipped policy loss. Ours: how the tracker begins and how
drift is measured (see ValueTracker), the floor under the deviation that advantages are divided by, and all defaults
but `rho_min`, `rho_max` and `half_life`. Prompts come in the order of the data; the paper's choice of prompts by
sqrt(v (1 - v)) is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cpt.recipe.schema import Recipe
from cpt.stages.sampling.generation_batches import on_device
from cpt.stages.sampling.rewarded import RewardedTrainer, SingleAnswers
from cpt.stages.sampling.value_tracker import ValueTracker

SAMPLED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


@dataclass
class SPOConfig(SingleAnswers):
    """What SPO adds."""

    half_life: float = 0.06
    """Drift of the policy (KL divergence of a token, in nats) after which a prompt's past rewards count half."""
    rho_min: float = 0.875
    """The least that the past counts at a prompt's next answer."""
    rho_max: float = 0.96
    """The most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rho_min <= self.rho_max < 1:
            raise ValueError(f"expected 0 < rho_min <= rho_max < 1, got {self.rho_min} and {self.rho_max}")
        if self.half_life <= 0:
            raise ValueError(f"half_life must be more than 0, got {self.half_life}")


class SPOTrainer(RewardedTrainer):
    """A value for each prompt beside the policy."""

    def __init__(self, recipe: Recipe, model: nn.Module, arguments: SPOConfig, **options: Any) -> None:
        self.tracker = ValueTracker(
            half_life=arguments.half_life, rho_min=arguments.rho_min, rho_max=arguments.rho_max
        )
        self.last: dict[str, torch.Tensor] | None = None
        super().__init__(recipe, model, arguments, **options)

    def advantages_of(self, inputs: list[dict[str, Any]], made: dict[str, Any]) -> dict[str, Any]:
        """Rewards less the tracked values from before them, normalised over all processes; then the tracker learns."""
        self.follow_drift(made)
        config: Any = self.args
        rewards = self.rewards_of_all
        answered = [row["prompt"] for row in self.prompts for _ in range(config.num_generations)]
        before = torch.tensor(self.tracker.values(answered), device=rewards.device, dtype=rewards.dtype)
        rho = self.tracker.learn(answered, rewards.tolist())
        surprise = rewards - before
        known = surprise[~surprise.isnan()]
        self.note_tracker(before, known, rho)
        if len(known) > 1:
            surprise = (surprise - known.mean()) / known.std(correction=0).clamp(min=config.least_deviation)
        size = len(surprise) // config.world_size
        return {"advantages": surprise.nan_to_num(0.0)[config.process_index * size :][:size]}

    def follow_drift(self, made: dict[str, Any]) -> None:
        """Add how far the policy moved since the last generation, by what it thinks now of that one's completions.

        The mean over tokens of exp(d) - d - 1, d being the change of a token's log-probability: never negative, and on
        average the KL divergence of the present policy from the one that sampled.
        """
        if self.last is not None:
            change = self.log_probabilities(self.last) - self.last["logps"]
            mask = self.last["completion_mask"]
            moved = ((change.exp() - change - 1) * mask).sum()
            total, tokens = self.accelerator.reduce(
                torch.stack((moved, mask.sum().to(moved.dtype))), reduction="sum"
            ).tolist()
            self.tracker.drift += total / max(tokens, 1.0)
        known = made.get("old_per_token_logps")
        logps = self.log_probabilities(made) if known is None else known
        self.last = {**{name: made[name] for name in SAMPLED}, "logps": logps}

    def note_tracker(self, before: torch.Tensor, surprise: torch.Tensor, rho: float) -> None:
        """For the log."""
        figures = {"value/mean": before.mean().item(), "value/drift": self.tracker.drift, "value/rho": rho}
        if len(surprise):
            figures["value/error"] = surprise.abs().mean().item()
        for name, value in figures.items():
            self.note_figure(name, value)

    def state_of_process(self) -> dict[str, Any]:
        """The last completions, of which the drift is measured."""
        return {"last": self.last}

    def restore_process(self, state: Mapping[str, Any]) -> None:
        """Go on with them; without them the drift of one generation is not counted."""
        last = state.get("last")
        self.last = None if last is None else on_device(last, self.args.device)

    def own_state(self) -> dict[str, Any]:
        """The tracker."""
        return self.tracker.state()

    def restore_own(self, state: Mapping[str, Any]) -> None:
        """Go on with it."""
        self.tracker.restore(state)
