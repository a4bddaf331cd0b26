"""On a GPU whose Triton does not work, torch's operations compute the fused loss there, with the same values."""

from types import SimpleNamespace

import pytest
import torch
from labelled_devices import labelled_devices
from tiny_models import tiny_model
from torch.nn import functional as F

from cpt.models import fused_loss
from cpt.models.fused_loss import FusedLoss, LinearCrossEntropy, set_up_loss

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def without_triton(monkeypatch):
    monkeypatch.setenv("CPT_TRITON_FAILURE", "no C compiler")
    operation = fused_loss.cross_entropy_in_place
    monkeypatch.setattr(
        fused_loss, "cross_entropy_in_place", operation._init_fn
    )  # modes do not see inside it


def test_the_fused_loss_stays_on_the_gpu_without_its_kernel():
    hidden, weight = torch.randn(70, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    targets = torch.arange(70) % 30
    expected = F.cross_entropy(hidden @ weight.T, targets)
    gradients = torch.autograd.grad(expected, [hidden, weight])
    with labelled_devices():
        inputs = [hidden.detach().cuda().requires_grad_(), weight.detach().cuda().requires_grad_()]
        scale = torch.full((), 1 / 70, device="cuda")
        loss, losses = LinearCrossEntropy.apply(*inputs, None, targets.cuda(), scale, 0.0, 32)
        assert loss.is_cuda and losses.is_cuda
        loss.backward()
        assert all(tensor.grad.is_cuda for tensor in inputs)
        results = [loss.cpu(), *(tensor.grad.cpu() for tensor in inputs)]
    torch.testing.assert_close(results, [expected, *gradients])


def test_an_evaluation_is_scored_without_the_kernel():
    model = tiny_model("llama").eval()
    ids = torch.arange(4, 28).view(1, -1)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    fused = FusedLoss(model)
    with labelled_devices(), torch.no_grad():
        on_gpu = ids.cuda()
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.cuda()
        losses, _ = fused.score(model, {"input_ids": on_gpu}, on_gpu)
        assert losses.is_cuda
        losses = losses.cpu()
    torch.testing.assert_close(
        losses[0, :-1], F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    )


@pytest.mark.parametrize(
    ("device", "wanted", "is_reported"), [("cuda", "auto", True), ("cpu", True, False)]
)
def test_a_loss_without_its_kernel_is_reported(caplog, device, wanted, is_reported):
    training = SimpleNamespace(device=torch.device(device), label_smoothing_factor=0.0)
    set_up_loss(tiny_model("llama"), wanted, training)
    reported = [
        record.details["key"]
        for record in caplog.records
        if vars(record).get("event") == "fallback"
    ]
    assert reported == ["model.fused_loss"] * is_reported
