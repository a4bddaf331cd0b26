"""Draw tokens so that a text's answer does not depend on the other texts of its batch.

transformers samples with one stream of random numbers for the whole batch, so a text's answer would change with its
neighbours. Here each text has random numbers of its own, from its seed, and `generate` is greedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int = 512
    temperature: float = 0.7
    """0: always the most likely token."""
    top_p: float = 0.95
    """Only the most likely tokens that have this much of the probability together."""

    def processors(self, seeds: Sequence[int], prompt_length: int) -> LogitsProcessorList:
        if self.temperature == 0:
            return LogitsProcessorList()
        narrowed = [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        drawn = SeededDraws(seeds, prompt_length, self.max_new_tokens)
        return LogitsProcessorList([TemperatureLogitsWarper(self.temperature), *narrowed, drawn])


class SeededDraws(LogitsProcessor):
    """Leaves only the token that the random numbers of each row's own seed choose."""

    def __init__(self, seeds: Sequence[int], prompt_length: int, max_new_tokens: int) -> None:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]  # on the CPU: the same on any device
        self._numbers = torch.stack(
            [torch.rand(max_new_tokens, generator=one, dtype=torch.float64) for one in generators]
        )
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        numbers = self._numbers[:, input_ids.shape[1] - self._prompt_length, None].to(scores.device)
        sums = scores.double().softmax(-1).cumsum(-1)  # B batch, V vocabulary
        tokens = torch.searchsorted(sums, numbers * sums[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter(1, tokens, 0.0)
