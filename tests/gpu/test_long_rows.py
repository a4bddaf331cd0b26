"""Rows of 32,768 tokens on a CUDA GPU: more than 2^31 logits in the loss, one long document in attention."""

from itertools import accumulate

import pytest
import torch
from gpu_device import DEVICE, ON_GPU
from torch.nn import functional as F

from cpt.models.attention import attend_each, torch_kernel
from cpt.models.fused_loss import LinearCrossEntropy

pytestmark = pytest.mark.gpu
TOKENS, VOCABULARY = (32_768, 151_936) if ON_GPU else (1024, 4000)
WIDTH = 64
CHUNK = 2048  # tokens of the reference at once
HALF_PRECISION = 1e-2  # relative, of a whole tensor


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(
        DEVICE, torch.bfloat16
    )


def reference(hidden, weight, targets):
    """The mean loss and both gradients, in fp32 over small chunks."""
    hidden, weight = (tensor.detach().float().requires_grad_() for tensor in (hidden, weight))
    total = 0.0
    for start in range(0, TOKENS, CHUNK):
        tokens = slice(start, start + CHUNK)
        loss = (
            F.cross_entropy(hidden[tokens] @ weight.t(), targets[tokens], reduction="sum") / TOKENS
        )
        loss.backward()
        total += loss.item()
    return total, hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [None, TOKENS], ids=["in chunks", "all logits at once"])
def test_the_fused_loss_of_a_long_row_has_the_references_gradients(chunk):
    hidden = drawn(TOKENS, WIDTH, seed=0).requires_grad_()
    weight = (
        drawn(VOCABULARY, WIDTH, seed=1).mul_(0.1).requires_grad_()
    )  # large logits would lose bits in bfloat16
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(2)).to(
        DEVICE
    )
    scale = torch.tensor(1 / TOKENS, device=DEVICE)
    loss, _ = LinearCrossEntropy.apply(hidden, weight, None, targets, scale, 0.0, chunk)
    gradients = torch.autograd.grad(loss, [hidden, weight])
    expected, *wanted = reference(hidden, weight, targets)
    assert loss.item() == pytest.approx(expected, rel=1e-3)
    for gradient, exact in zip(gradients, wanted, strict=True):
        assert (gradient.float() - exact).norm() < HALF_PRECISION * exact.norm()


@pytest.mark.parametrize(
    "lengths", [(TOKENS,), (TOKENS // 2, 1, TOKENS // 2 - 1)], ids=["one", "three"]
)
def test_attention_over_a_long_row_is_that_of_sdpa_within_documents(lengths):
    heads, grouped = (8, 2, 2), 4  # of queries, keys and values; query heads of each key head
    states = [
        drawn(TOKENS, count, WIDTH, seed=seed).requires_grad_() for seed, count in enumerate(heads)
    ]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(DEVICE)
    attend = torch_kernel if ON_GPU else attend_each
    output = attend(*states, bounds, max(lengths), WIDTH**-0.5, None)
    parts = []
    for documents in zip(*(state.split(lengths) for state in states), strict=True):
        query, key, value = (state.transpose(0, 1)[None] for state in documents)
        key, value = (state.repeat_interleave(grouped, dim=1) for state in (key, value))
        parts.append(
            F.scaled_dot_product_attention(query, key, value, is_causal=True)[0].transpose(0, 1)
        )
    expected = torch.cat(parts)
    assert (output - expected).float().norm() < HALF_PRECISION * expected.float().norm()
    weights = drawn(*output.shape, seed=9)
    found, wanted = (torch.autograd.grad((of * weights).sum(), states) for of in (output, expected))
    for gradient, exact in zip(found, wanted, strict=True):
        assert (gradient - exact).float().norm() < HALF_PRECISION * exact.float().norm()
