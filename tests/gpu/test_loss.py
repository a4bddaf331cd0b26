"""The fused loss on a CUDA GPU: its kernel, its gradients, and an evaluation without whole logits."""

import pytest
import torch
from gpu_device import DEVICE
from torch.nn import functional as F

from cpt.models.fused_loss import PADDED_TO, LinearCrossEntropy, cross_entropy_in_place

pytestmark = pytest.mark.gpu
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


def some_targets(tokens, vocabulary):
    targets = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(1))
    targets[::5] = -100
    targets[1], targets[2] = vocabulary - 1, 0
    return targets.to(DEVICE)


def exact(logits, targets, cap, scale):
    """Losses and the logits' gradient in fp64."""
    logits = logits.double().requires_grad_()
    losses = F.cross_entropy(
        cap * torch.tanh(logits / cap) if cap else logits,
        targets,
        ignore_index=-100,
        reduction="none",
    )
    return losses.detach(), torch.autograd.grad(losses.sum() * scale, logits)[0]


@pytest.mark.parametrize("cap", [0.0, 30.0])
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("vocabulary", [1000, 50_257, 151_936])
def test_the_kernel_gives_losses_and_gradients_of_fp64(vocabulary, dtype, cap):
    scale, targets = torch.tensor(0.3, device=DEVICE), some_targets(64, vocabulary)
    width = -(-vocabulary // PADDED_TO) * PADDED_TO
    logits = drawn(64, width, dtype=dtype).mul_(8)[:, :vocabulary]
    losses, gradient = exact(logits, targets, cap, scale.double())
    unchanged = logits.clone()
    found = cross_entropy_in_place(unchanged, targets, scale, cap, False)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=1e-5)
    assert torch.equal(unchanged, logits) and torch.equal(
        cross_entropy_in_place(logits, targets, scale, cap, True), found
    )
    assert (logits.double() - gradient).norm() < ROUNDING[dtype] * gradient.norm()
    assert not logits[targets == -100].any()


@pytest.mark.parametrize("autocast", [False, True])
def test_the_heads_gradient_adds_up_in_fp32_over_many_chunks(autocast):
    tokens, width, vocabulary = 4096, 128, 1003
    hidden = drawn(tokens, width, dtype=torch.bfloat16).requires_grad_()
    weight = (
        drawn(vocabulary, width, dtype=torch.bfloat16)
        .mul_(0.2)
        .to(torch.float32 if autocast else torch.bfloat16)
        .requires_grad_()
    )
    targets, scale = some_targets(tokens, vocabulary), torch.tensor(1 / tokens, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss, _ = LinearCrossEntropy.apply(hidden, weight, None, targets, scale, 0.0, 32)
    found = torch.autograd.grad(loss, [hidden, weight])
    of_hidden, of_weight = (
        hidden.detach().double().requires_grad_(),
        weight.detach().double().requires_grad_(),
    )
    wanted = (
        F.cross_entropy(of_hidden @ of_weight.t(), targets, ignore_index=-100, reduction="sum")
        / tokens
    )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-3)
    of_hidden, of_weight = torch.autograd.grad(wanted, [of_hidden, of_weight])
    assert (found[0].double() - of_hidden).norm() < 1e-2 * of_hidden.norm()
    assert (found[1].double() - of_weight).norm() < 5e-3 * of_weight.norm(), (
        "128 sums in bfloat16 would be off by 1.4 %"
    )
