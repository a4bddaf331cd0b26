"""The parts of a step on an emulated GPU: streams and events, the fused loss, kernels."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cuda_stand_ins import emulated_cuda
from emulated_gpu import MixedDevicesError
from labelled_devices import device_of
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from cpt.checkpoints.snapshot import HostCopies, copy_beside_training, mark
from cpt.hardware import TRITON
from cpt.models.fused_loss import FusedLoss, LinearCrossEntropy, cross_entropy_in_place
from cpt.optim.adamw import OneKernelAdamW
from cpt.recipe.schema import Component
from cpt.training.loss_guard import SpikeDetector

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def gpu():
    with emulated_cuda() as operations:
        yield operations.gpu


def test_a_snapshot_on_another_stream_waits_for_the_update_before_it():
    weight = torch.ones(100, device="cuda").add_(1)
    moment = mark()

    def copy():
        copy_beside_training(moment)
        return HostCopies().copy([weight])[0]

    with ThreadPoolExecutor(1) as writer:
        copied = writer.submit(copy).result()
    assert copied.device.type == "cpu" and copied.tolist() == [2.0] * 100


def test_the_loss_guard_reads_verdicts_without_a_race_and_two_steps_late(gpu):
    detector = SpikeDetector(Component(name="robust"), torch.device("cuda:0"))
    for step in range(1, 6):
        gpu.step = step
        detector.check(step, torch.full((2,), 3.0, device="cuda"))
        list(detector.read(unread=2))
    late = {wait.steps_late for wait in gpu.waits if "synchronizes" in wait.kind}
    assert late == {2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_loss_returns_gradients_of_its_inputs_device_and_dtype(dtype):
    hidden = torch.randn(40, 8, device="cuda", dtype=dtype).requires_grad_()
    weight = torch.randn(50, 8, device="cuda", dtype=dtype).requires_grad_()
    targets = torch.zeros(40, dtype=torch.long, device="cuda")
    scale = torch.full((), 1 / 40, device="cuda")
    loss, _ = LinearCrossEntropy.apply(hidden, weight, None, targets, scale, 0.0, 16)
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    for gradient, given in ((of_hidden, hidden), (of_weight, weight)):
        assert (device_of(gradient), gradient.dtype) == (device_of(given), given.dtype)


class Outputs(TorchDispatchMode):
    """Keeps the dtype and shape of what each operation makes."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        output = operation(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.made.append((operation.overloadpacket, output.dtype, tuple(output.shape)))
        return output


def test_the_fused_loss_makes_each_chunk_of_logits_once_and_none_in_fp32():
    model = tiny_model("llama", dtype="bfloat16").to("cuda").train()
    FusedLoss(model, tokens=16)
    ids = torch.randint(4, 96, (2, 32)).to("cuda")
    with Outputs() as outputs:
        model(input_ids=ids, labels=ids).loss.backward()
    logits = [(operation, dtype) for operation, dtype, shape in outputs.made if shape[-1:] == (96,)]
    assert {dtype for _, dtype in logits} == {torch.bfloat16}
    assert sum(operation is torch.ops.aten.mm for operation, _ in logits) == 4


@pytest.mark.parametrize("gradient", [True, False])
def test_without_triton_the_loss_stays_on_the_gpu_and_never_waits(gpu, monkeypatch, gradient):
    monkeypatch.setenv(TRITON, "no compiler")
    logits = torch.randn(4, 96, device="cuda", dtype=torch.bfloat16)
    targets, scale = torch.zeros(4, dtype=torch.long, device="cuda"), torch.ones((), device="cuda")
    assert cross_entropy_in_place(logits, targets, scale, 5.0, gradient).device.type == "cuda"
    assert not gpu.waits


def test_a_kernel_refuses_memory_of_the_host():
    weight = torch.nn.Parameter(torch.ones(5000, device="cuda", dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = OneKernelAdamW(
        [{"params": [weight]}], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    optimizer.step()
    optimizer.found_inf = torch.zeros(())
    with pytest.raises(MixedDevicesError):
        optimizer.step()
