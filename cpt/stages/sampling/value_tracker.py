"""What each prompt's answers have been worth, for stages without groups: a mean that forgets as the policy moves away
from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import torch
from xxhash import xxh3_64_intdigest

NOTHING_KNOWN = 0.5


@dataclass
class Tracked:
    """Of one prompt."""

    value: float
    count: float
    """How many answers it is worth: the effective sample size."""
    seen_at: float
    """The policy's drift when it was answered last."""


class ValueTracker:
    """A persistent estimate of each prompt's reward under the present policy (arXiv 2509.13232, section on the value
    tracker).

    The paper's: with a reward r between 0 and 1, alpha and beta of a Beta distribution become rho alpha + r and rho
    beta + 1 - r, the value is alpha / (alpha + beta), and rho = 2^(-D / half_life) within bounds, D being how far the
    policy moved since the prompt was answered. Kept as value and count = alpha + beta, the same rule is a running
    mean, which holds for rewards of any size.

    Ours: D is the sum of what the policy moved between generations, measured on the completions of each, and not for
    each prompt by itself; a new prompt begins at the mean of all others and not at answers that were sampled before;
    it counts as 1 / (1 - rho_min) answers.
    """

    def __init__(self, *, half_life: float, rho_min: float, rho_max: float) -> None:
        self.half_life, self.rho_min, self.rho_max = half_life, rho_min, rho_max
        self.prompts: dict[int, Tracked] = {}
        self.drift = 0.0

    def values(self, prompts: Sequence[Any]) -> list[float]:
        """The present estimates."""
        prior = self.prior()
        return [self.prompts[key].value if key in self.prompts else prior for key in map(key_of, prompts)]

    def prior(self) -> float:
        """Of a prompt that was never answered."""
        return float(np.mean([known.value for known in self.prompts.values()])) if self.prompts else NOTHING_KNOWN

    def learn(self, prompts: Sequence[Any], rewards: Sequence[float]) -> float:
        """Take in what answers were worth, NaN where no reward applied; returns the mean of rho."""
        prior, rhos = self.prior(), []
        for key, reward in zip(map(key_of, prompts), rewards, strict=True):
            if np.isnan(reward):
                continue
            known = self.prompts.setdefault(key, Tracked(prior, 1 / (1 - self.rho_min), self.drift))
            rho = min(max(2 ** (-(self.drift - known.seen_at) / self.half_life), self.rho_min), self.rho_max)
            known.count = rho * known.count + 1
            known.value += (reward - known.value) / known.count
            known.seen_at = self.drift
            rhos.append(rho)
        return float(np.mean(rhos)) if rhos else 1.0

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        known = [(tracked.value, tracked.count, tracked.seen_at) for tracked in self.prompts.values()]
        figures = torch.tensor(known, dtype=torch.float64).reshape(-1, 3)
        return {
            "prompts": torch.tensor(list(self.prompts), dtype=torch.int64),
            "figures": figures,
            "drift": self.drift,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what a checkpoint kept."""
        self.prompts = {
            key: Tracked(*known)
            for key, known in zip(state["prompts"].tolist(), state["figures"].tolist(), strict=True)
        }
        self.drift = state["drift"]


def key_of(prompt: Any) -> int:
    """A prompt's hash, of 63 bits: texts and messages alike."""
    return xxh3_64_intdigest(orjson.dumps(prompt, option=orjson.OPT_SORT_KEYS)) >> 1
