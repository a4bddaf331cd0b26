"""Single-stream policy optimization (arXiv 2509.13232): one answer per prompt, compared with the value of the prompt's
earlier answers.

From the paper: the value tracker, the advantage (reward minus the value before this answer, normalized over the whole
batch) and the clipped policy loss. Ours: the tracker's initial values, the measure of drift (see ValueTracker), the
lower bound of the deviation by which advantages are divided, and all defaults except `rho_min`, `rho_max` and
`half_life`. Prompts come in the order of the data; the paper's choice of prompts by sqrt(v (1 - v)) is not
implemented."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch
from torch import nn
from xxhash import xxh3_64_intdigest

from cpt.recipe.schema import Recipe
from cpt.stages.generating import RewardedTrainer, SingleAnswers

SAMPLED = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
NOTHING_KNOWN = 0.5


@dataclass
class SPOConfig(SingleAnswers):
    """SPO's keys."""

    half_life: float = 0.06
    """Drift of the policy (KL divergence of a token, in nats) that halves the weight of a prompt's past rewards."""
    rho_min: float = 0.875
    """Least weight of the past at a prompt's next answer."""
    rho_max: float = 0.96
    """Largest weight of the past."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rho_min <= self.rho_max < 1:
            raise ValueError(
                f"expected 0 < rho_min <= rho_max < 1, got {self.rho_min} and {self.rho_max}"
            )
        if self.half_life <= 0:
            raise ValueError(f"half_life must be more than 0, got {self.half_life}")


class SPOTrainer(RewardedTrainer):
    """GRPO's loop with a value for each prompt."""

    def __init__(
        self, recipe: Recipe, model: nn.Module, arguments: SPOConfig, **options: Any
    ) -> None:
        self.tracker = ValueTracker(
            half_life=arguments.half_life, rho_min=arguments.rho_min, rho_max=arguments.rho_max
        )
        super().__init__(recipe, model, arguments, **options)

    def advantages_of(
        self, inputs: list[dict[str, Any]], outputs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return rewards minus previously tracked values, normalized over all processes; then update the tracker."""
        if (
            self.last is not None
        ):  # missing after a resume: the drift of one generation is not counted
            # Drift of the policy since the last generation, measured on that generation's completions: the mean over
            # tokens of exp(d) - d - 1, with d the change of a token's log-probability. It is never negative; its
            # expectation is the KL divergence of the present policy from the sampling one.
            change = self.log_probabilities(self.last) - self.last["logps"]
            mask = self.last["completion_mask"]
            moved = ((change.exp() - change - 1) * mask).sum()
            sums = torch.stack((moved, mask.sum().to(moved.dtype)))
            total, tokens = self.accelerator.reduce(sums, reduction="sum").tolist()
            self.tracker.drift += total / max(tokens, 1.0)
        logps = outputs.get("old_per_token_logps")
        logps = self.log_probabilities(outputs) if logps is None else logps
        self.last = {**{name: outputs[name] for name in SAMPLED}, "logps": logps}
        config = self.args
        rewards = self.rewards_of_all
        answered = [row["prompt"] for row in self.prompts for _ in range(config.num_generations)]
        before = torch.tensor(
            self.tracker.values(answered), device=rewards.device, dtype=rewards.dtype
        )
        rho = self.tracker.learn(answered, rewards.tolist())
        surprise = rewards - before
        finite = surprise[~surprise.isnan()]
        metrics = {
            "value/mean": before.mean().item(),
            "value/drift": self.tracker.drift,
            "value/rho": rho,
        }
        if len(finite):
            metrics["value/error"] = finite.abs().mean().item()
        for name, value in metrics.items():
            self.add_metric(name, value)
        if len(finite) > 1:
            surprise = (surprise - finite.mean()) / finite.std(correction=0).clamp(
                min=config.least_deviation
            )
        return {"advantages": self.part_of_process(surprise.nan_to_num(0.0))}

    def own_state(self) -> dict[str, Any]:
        return self.tracker.state()

    def restore_own(self, state: Mapping[str, Any]) -> None:
        self.tracker.restore(state)


@dataclass
class Tracked:
    value: float
    count: float  # effective sample size, in answers
    seen_at: float  # the policy's drift at the prompt's last answer


class ValueTracker:
    """A persistent estimate of each prompt's reward under the present policy (arXiv 2509.13232, section on the value
    tracker).

    From the paper: with a reward r between 0 and 1, alpha and beta of a Beta distribution become rho alpha + r and rho
    beta + 1 - r, the value is alpha / (alpha + beta), and rho = 2^(-D / half_life) within bounds, with D the policy's
    drift since the prompt's last answer. Stored as value and count = alpha + beta, the same rule is a running mean,
    which works for rewards of any size.

    Ours: D sums the policy's drift between generations, measured on all completions of each generation instead of per
    prompt; a new prompt starts at the mean of all others instead of at answers sampled in advance; this counts as
    1 / (1 - rho_min) answers.
    """

    def __init__(self, *, half_life: float, rho_min: float, rho_max: float) -> None:
        self.half_life = half_life
        self.rho_min = rho_min
        self.rho_max = rho_max
        self.prompts: dict[int, Tracked] = {}
        self.drift = 0.0

    def values(self, prompts: Sequence[Any]) -> list[float]:
        prior = self.prior()
        return [
            self.prompts[key].value if key in self.prompts else prior
            for key in map(key_of, prompts)
        ]

    def prior(self) -> float:
        if self.prompts:
            return float(np.mean([tracked.value for tracked in self.prompts.values()]))
        return NOTHING_KNOWN

    def learn(self, prompts: Sequence[Any], rewards: Sequence[float]) -> float:
        """Update values with rewards, NaN if no reward applied; return the mean of rho."""
        prior = self.prior()
        rhos = []
        for key, reward in zip(map(key_of, prompts), rewards, strict=True):
            if np.isnan(reward):
                continue
            tracked = self.prompts.setdefault(
                key, Tracked(prior, 1 / (1 - self.rho_min), self.drift)
            )
            rho = min(
                max(2 ** (-(self.drift - tracked.seen_at) / self.half_life), self.rho_min),
                self.rho_max,
            )
            tracked.count = rho * tracked.count + 1
            tracked.value += (reward - tracked.value) / tracked.count
            tracked.seen_at = self.drift
            rhos.append(rho)
        if rhos:
            return float(np.mean(rhos))
        return 1.0

    def state(self) -> dict[str, Any]:
        tracked_values = []
        for tracked in self.prompts.values():
            tracked_values.append((tracked.value, tracked.count, tracked.seen_at))
        metrics = torch.tensor(tracked_values, dtype=torch.float64).reshape(-1, 3)
        return {
            "prompts": torch.tensor(list(self.prompts), dtype=torch.int64),
            "figures": metrics,
            "drift": self.drift,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        pairs = zip(state["prompts"].tolist(), state["figures"].tolist(), strict=True)
        self.prompts = {key: Tracked(*values) for key, values in pairs}
        self.drift = state["drift"]


def key_of(prompt: Any) -> int:
    """Hash a prompt, text or messages, to 63 bits."""
    return xxh3_64_intdigest(orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)) >> 1
