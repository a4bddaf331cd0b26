"""Draw tokens so that what one text gets depends on nothing beside it: not on its batch, its place in it, or what was
drawn before.

transformers samples with one stream of random numbers for the whole batch, so a text's answer would change with its
neighbours. Here the noise is a function of (the text's seed, the number of the token, the token): with Gumbel noise
added to the logits, the largest one is a draw from the softmax (arxiv.org/abs/1611.01144, section 2), and `generate`
can be greedy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

# Of splitmix64, as signed numbers: multiplication wraps around in both.
GOLDEN, MIX_1, MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
BITS = 52  # so that no number rounds to 1, whose noise would be infinite


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    max_new_tokens: int = 512
    temperature: float = 0.7
    """0: always the most likely token."""
    top_p: float = 0.95
    """Only the most likely tokens that have this much of the probability together."""

    def processors(self, seeds: Sequence[int], prompt_length: int) -> LogitsProcessorList:
        """For `generate(do_sample=False)`."""
        if self.temperature == 0:
            return LogitsProcessorList()
        narrowed = [TopPLogitsWarper(self.top_p)] if self.top_p < 1 else []
        return LogitsProcessorList(
            [TemperatureLogitsWarper(self.temperature), *narrowed, GumbelNoise(seeds, prompt_length)]
        )


class GumbelNoise(LogitsProcessor):
    """Adds the noise of each row's own seed."""

    def __init__(self, seeds: Sequence[int], prompt_length: int) -> None:
        self._seeds = torch.tensor([seed - 2**63 for seed in seeds])
        self._prompt_length = prompt_length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Logits with noise, of which the largest is the draw."""
        number = torch.tensor(
            input_ids.shape[1] - self._prompt_length + 1, device=scores.device
        )  # a tensor, because its product wraps
        rows = mixed(self._seeds.to(scores.device) + number * GOLDEN)
        tokens = torch.arange(1, scores.shape[1] + 1, device=scores.device)
        numbers = mixed(rows[:, None] + tokens[None, :] * GOLDEN)  # B batch, V vocabulary
        uniform = ((shifted(numbers, 64 - BITS)).double() + 0.5) * 2.0**-BITS
        return scores - torch.log(-torch.log(uniform)).to(scores.dtype)


def mixed(numbers: Tensor) -> Tensor:
    """The finish of splitmix64: each bit of the result depends on all of the argument's
    (prng.di.unimi.it/splitmix64.c)."""
    numbers = (numbers ^ shifted(numbers, 30)) * MIX_1
    numbers = (numbers ^ shifted(numbers, 27)) * MIX_2
    return numbers ^ shifted(numbers, 31)


def shifted(numbers: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in from the left; torch's own shift brings in the sign."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)
