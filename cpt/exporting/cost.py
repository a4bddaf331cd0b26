"""What quantising costs: bits per byte, the shift of the probabilities, the first choices; and how much of it is
allowed.

Two bounds, and the smaller holds. **A smaller model**: quantising saves memory, and so would fewer parameters. By the
fit of Besiroglu et al. 2024 (arxiv.org/abs/2404.10102, to the runs of Hoffmann et al. 2022) the part of the loss that
hangs on the number of parameters N is
482.01 N^-0.3478 nats a token; an unquantised model of the size that the quantised one has would lose the difference. A
quantised model that loses more is not worth its memory. **The run**: what quantising loses may be no more than half of
what the run gained on its own held-out text; otherwise most of the training would be thrown away on the way out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from cpt.checkpoints.model_card import Judgement
from cpt.exporting.judged_text import JudgedText

SIZE_FACTOR, SIZE_POWER = 482.01, 0.3478
SHARE_OF_GAIN = 0.5

Logits = Callable[[list[int]], torch.Tensor]
"""Tokens -> [T, V] in fp32."""


@dataclass(frozen=True)
class Cost:
    """Of a quantised model against the model that it was made of, on the same text.

    Attributes:
        before, after: bits per byte.
        divergence: mean Kullback-Leibler divergence of the quantised model's probabilities from the other's, in nats a
            token.
        agreement: share of the tokens whose most probable successor is the same.
        allowed: rise in bits per byte.
        reason: where that bound comes from.
    """

    before: float
    after: float
    divergence: float
    agreement: float
    allowed: float
    reason: str

    @property
    def rise(self) -> float:
        """In bits per byte."""
        return self.after - self.before

    @property
    def is_allowed(self) -> bool:
        """NaN is not."""
        return self.rise <= self.allowed

    def __str__(self) -> str:
        rise, allowed = self.rise / self.before, self.allowed / self.before
        return (
            f"{self.before:.4f} -> {self.after:.4f} bits per byte ({rise:+.2%}, allowed {allowed:+.2%}:"
            f" {self.reason}); mean KL divergence {self.divergence:.2g} nats a token, same first choice for"
            f" {self.agreement:.1%} of the tokens"
        )


def cost(before: Sequence[torch.Tensor], after: Logits, text: JudgedText, bound: "Bound") -> Cost:
    """Compare two models window by window.

    Args:
        before: the unquantised model's logits, [T, V] a window.
        after: gives the quantised model's.
    """
    nats = torch.zeros(2, dtype=torch.float64)
    divergence, same = 0.0, 0
    for window, logits in zip(text.windows, before, strict=True):
        targets = torch.tensor(window[1:])
        other = after(window)[:-1, : logits.shape[-1]]
        old, new = logits[:-1, : other.shape[-1]].log_softmax(-1), other.log_softmax(-1)
        nats += torch.tensor(
            [F.nll_loss(one, targets, reduction="sum").item() for one in (old, new)], dtype=torch.float64
        )
        divergence += F.kl_div(new, old, reduction="sum", log_target=True).item()
        same += int((old.argmax(-1) == new.argmax(-1)).sum())
    tokens = text.num_predicted
    old_bits, new_bits = (nats / math.log(2) / text.num_bytes).tolist()
    allowed, reason = bound.in_bits_per_byte(old_bits, tokens / text.num_bytes)
    return Cost(old_bits, new_bits, divergence / tokens, same / tokens, allowed, reason)


def logits_of_windows(model: nn.Module, text: JudgedText) -> list[torch.Tensor]:
    """[T, V] in fp32 for each window."""
    return [logits_of_ids(model, window) for window in text.windows]


def logits_of_ids(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """[T, V] in fp32, on the CPU."""
    device = next(model.parameters()).device
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
    return logits.float().cpu()


@dataclass(frozen=True)
class Bound:
    """How much may be lost.

    Attributes:
        parameters: of the model.
        share: bytes after over bytes before, 16 bits a parameter.
        gain: bits per byte that the run gained on its held-out text; None where nobody knows.
        stated: the user's own limit, a share of the unquantised model's bits per byte; it holds alone.
    """

    parameters: int
    share: float
    gain: float | None = None
    stated: float | None = None

    def in_bits_per_byte(self, before: float, tokens_per_byte: float) -> tuple[float, str]:
        """The bound and its reason."""
        if self.stated is not None:
            return self.stated * before, "--max-rise"
        nats = SIZE_FACTOR * self.parameters**-SIZE_POWER * (self.share**-SIZE_POWER - 1)
        smaller = max(0.0, nats) / math.log(2) * tokens_per_byte
        if self.gain is not None and self.gain * SHARE_OF_GAIN < smaller:
            return self.gain * SHARE_OF_GAIN, f"half of what the run gained, {self.gain:.4f}"
        return smaller, f"what a model of {self.share:.0%} of the parameters would lose"


def gain_of(judgements: Sequence[Judgement]) -> float | None:
    """The largest gain of a run on one of its held-out sets; None where it has none that counts."""
    gains = [one.before - one.after for one in judgements if one.before is not None]
    return max(gains) if gains and max(gains) > 0 else None
