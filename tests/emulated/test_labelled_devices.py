"""The emulated GPU keeps the rules: one device per operation, streams, pinned memory, waits of the host."""

import pytest
import torch
from emulated_gpu import MixedDevicesError, RaceError, Stream
from labelled_devices import labelled_devices

from cpt.models.new_rows import KeptRows


@pytest.fixture
def gpu():
    with labelled_devices() as operations:
        yield operations.gpu


@pytest.fixture
def ones(gpu):
    return torch.ones(4, 4, device="cuda")


def test_gradients_of_a_copy_go_back_to_its_device(ones):
    weight = torch.ones(4, requires_grad=True)
    (weight.to("cuda") * ones).sum().backward()
    assert weight.grad.device.type == "cpu" and weight.grad.tolist() == [4.0] * 4


@pytest.mark.parametrize(
    "operation",
    [
        lambda ones: ones + torch.ones(1),
        lambda ones: torch.stack([ones.sum(), torch.tensor(1.0)]),
        lambda ones: torch.tensor(1.0).add_(ones.sum()),
        lambda ones: torch.nn.functional.embedding(torch.tensor([0]), ones),
    ],
    ids=["one element", "stacked scalars", "a result on the CPU", "ids"],
)
def test_an_operation_has_one_device(ones, operation):
    with pytest.raises(MixedDevicesError):
        operation(ones)


def test_scalars_of_the_cpu_join_pointwise_operations(ones):
    assert (ones * torch.tensor(2.0)).device.type == "cuda"


def test_another_stream_must_wait_for_a_write(gpu, ones):
    side = Stream()
    with side, pytest.raises(RaceError):
        ones * 2
    side.wait_stream(gpu.stream)
    with side:
        ones * 2


def test_the_host_must_wait_before_it_reads_a_copy(gpu, ones):
    on_host = torch.empty(4, 4, pin_memory=True)
    on_host.copy_(ones, non_blocking=True)
    event = gpu.stream.record_event()
    with pytest.raises(RaceError):
        on_host.tolist()
    event.synchronize()
    assert on_host.sum().item() == 16


@pytest.mark.parametrize(
    ("call", "waits"),
    [
        (lambda ones: ones.sum().item(), 1),
        (lambda ones: ones.tolist(), 1),
        (lambda ones: ones.cpu(), 1),
        (lambda ones: torch.tensor([1.0], device="cuda"), 1),
        (lambda ones: torch.ones(4).to("cuda", non_blocking=True), 1),
        (lambda ones: torch.ones(4).pin_memory().to("cuda", non_blocking=True), 0),
        (lambda ones: torch.full((), 3.0, device="cuda"), 0),
        (lambda ones: ones[ones > 0], 1),
        (lambda ones: ones[torch.tensor([0])], 1),
        (lambda ones: ones.masked_fill_(ones > 0, 2.0), 0),
        (lambda ones: torch.where(ones > 0, ones, 0.0), 0),
        (lambda ones: ones.to("cuda", torch.bfloat16), 0),
    ],
)
def test_waits_are_counted(gpu, ones, call, waits):
    gpu.waits.clear()
    call(ones)
    assert len(gpu.waits) == waits


def test_gradients_of_new_rows_wait_only_once(gpu, ones):
    keep = KeptRows([1, 3])
    assert keep(ones).sum(1).tolist() == [0, 4, 0, 4]
    gpu.waits.clear()
    keep(ones)
    assert not gpu.waits
