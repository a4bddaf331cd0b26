"""Rows of logits with masked words, ignored and impossible targets, and their cross entropy in fp64.

TRITON_INTERPRET=1 python tests/unusual_logits.py    compares the kernel, in Triton's interpreter
"""

import itertools
import math

import torch
from torch.nn import functional as F

VOCABULARY = 201
SCALE = torch.tensor(1 / 37)
IMPOSSIBLE = (VOCABULARY, 5000, -1, -101)
CASES = list(itertools.product((torch.float32, torch.bfloat16, torch.float16), (0.0, 30.0)))
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def unusual_rows(dtype):
    """[11, 201] and [11]: an ordinary row, three with masked words, one without a word, two ignored ones, ..."""
    logits = (torch.randn(11, VOCABULARY, generator=torch.Generator().manual_seed(2)) * 4).to(dtype)
    for row, masked in (
        (1, slice(128)),
        (2, slice(2, None)),
        (3, slice(150, None)),
        (4, slice(None)),
    ):
        logits[row, masked] = -math.inf
    logits[5] = math.inf
    return logits, torch.tensor([7, 150, 1, 0, 0, -100, -100, *IMPOSSIBLE])


def in_fp64(logits, targets, cap):
    """Losses, and gradients of their sum times the scale."""
    is_impossible = torch.isin(targets, torch.tensor(IMPOSSIBLE))
    exact = logits.double().requires_grad_()
    capped = cap * torch.tanh(exact / cap) if cap else exact
    losses = F.cross_entropy(capped, targets.where(~is_impossible, 0), reduction="none")
    losses = losses.where(~is_impossible, math.nan)
    (gradient,) = torch.autograd.grad(losses.sum() * SCALE, exact)
    gradient[is_impossible] = math.nan
    gradient[targets == -100] = 0
    return losses.detach(), gradient


def assert_as_in_fp64(cross_entropy, dtype, cap):
    """`cross_entropy` is called as `cross_entropy_in_place`."""
    logits, targets = unusual_rows(dtype)
    losses, gradient = in_fp64(logits, targets, cap)
    before = logits.clone()
    scored = cross_entropy(logits, targets, SCALE, cap, False)
    assert torch.equal(logits, before)
    torch.testing.assert_close(scored.double(), losses, rtol=1e-6, atol=2e-5, equal_nan=True)
    trained = cross_entropy(logits, targets, SCALE, cap, True)
    assert torch.equal(trained.nan_to_num(), scored.nan_to_num())
    torch.testing.assert_close(
        logits.double(),
        gradient,
        rtol=TOLERANCE[dtype],
        atol=TOLERANCE[dtype] * float(SCALE),
        equal_nan=True,
    )


if __name__ == "__main__":
    from cpt.models import fused_loss_kernel as kernel

    kernel.MOST_AT_ONCE = 64  # several blocks in each row, the first one masked
    for given in CASES:
        assert_as_in_fp64(kernel.launch, *given)
