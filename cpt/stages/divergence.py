"""How far a student's next-token probabilities are from a teacher's: forward KL, reverse KL, and what lies between
(arXiv 2306.13649)."""

import math

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TOKENS_AT_ONCE = 1024


def summed_divergence(
    student: torch.Tensor, teacher: torch.Tensor, *, beta: float, temperature: float = 1.0
) -> torch.Tensor:
    """The divergence summed over tokens, in fp32 for some of them at a time, which the backward pass computes again.

    Args:
        student: logits [tokens, vocabulary].
        teacher: logits of the same shape.
        beta: 0 is KL(teacher, student), 1 is KL(student, teacher); between them the generalised Jensen-Shannon
            divergence.
        temperature: that both logits are divided by.
    """
    total = student.new_zeros((), dtype=torch.float32)
    for own, other in zip(student.split(TOKENS_AT_ONCE), teacher.split(TOKENS_AT_ONCE), strict=True):
        part: torch.Tensor = checkpoint(divergence, own, other, beta, temperature, use_reentrant=False)
        total = total + part.sum()
    return total


def divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    """Of each token, in nats."""
    own = F.log_softmax(student.float() / temperature, dim=-1)
    other = F.log_softmax(teacher.float() / temperature, dim=-1)
    if beta == 0.0:
        return kl(other, own)
    if beta == 1.0:
        return kl(own, other)
    mixture = torch.logaddexp(other + math.log(beta), own + math.log1p(-beta))  # beta x teacher + (1 - beta) x student
    return beta * kl(other, mixture) + (1 - beta) * kl(own, mixture)


def kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """KL(first, second) of log-probabilities."""
    return F.kl_div(second, first, reduction="none", log_target=True).sum(dim=-1)
