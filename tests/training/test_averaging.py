"""Gradients averaged over processes while the backward pass runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_process_group import alone_in_a_group
from torch import nn

from cpt.training import averaging
from cpt.training.averaging import AverageInBackward

PROGRAM = Path(__file__).with_name("averaging_in_two_processes.py")
MAY_LACK = {"an expert for each process", "an expert of the last micro-batch of one process"}


@pytest.fixture(autouse=True)
def group(monkeypatch):
    """A process group of this process, and buckets of 300 numbers."""
    monkeypatch.setattr(averaging, "BUCKET_BYTES", 4 * 300)
    with alone_in_a_group():
        yield


@pytest.fixture
def layers():
    """Four layers, each of which fills a bucket."""
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


def average_of(model: nn.Module) -> AverageInBackward:
    return AverageInBackward(list(model.parameters()), may_lack=False)


@pytest.mark.slow
@pytest.mark.timeout(170)
def test_buckets_sent_in_the_backward_pass_have_the_averages_of_gradients_sent_one_by_one():
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(PROGRAM)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 16 and [case for case in cases if case["differ"]] == []
    early = {case["case"]: case["early"] for case in cases}
    assert all(early[name] > 0 for name in early.keys() - MAY_LACK)
    assert early["dense"] == 5 and early["a second gradient"] == 14


def test_a_layers_gradients_are_sent_before_those_of_the_layer_below_are_computed(
    layers, monkeypatch
):
    calls, all_reduce = [], dist.all_reduce
    for number, layer in enumerate(layers):
        layer.weight.register_hook(lambda _, number=number: calls.append(f"layer {number}"))

    def send(*arguments, **options):
        calls.append("send")
        return all_reduce(*arguments, **options)

    monkeypatch.setattr(dist, "all_reduce", send)
    average = average_of(layers)
    with average.during_backward():
        layers(torch.randn(2, 16)).sum().backward()
    assert calls == ["layer 3", "send", "layer 2", "send", "layer 1", "send", "layer 0", "send"]


def test_gradients_of_a_step_are_not_sent_before_its_last_micro_batch(layers):
    average = average_of(layers)
    layers(torch.ones(2, 16)).sum().backward()
    accumulated = [weight.grad for weight in layers.parameters()]
    assert average.num_sent == 0 and all(gradient is not None for gradient in accumulated)


def test_after_an_error_in_a_backward_pass_the_next_step_has_its_own_gradients(layers):
    average, inputs = average_of(layers), torch.ones(2, 16)
    fails = layers[1].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), average.during_backward():
        layers(inputs).sum().backward()
    fails.remove()
    layers.zero_grad()
    expected = torch.autograd.grad(layers(inputs).sum(), list(layers.parameters()))
    with average.during_backward():
        layers(inputs).sum().backward()
    assert all(
        torch.equal(weight.grad, each)
        for weight, each in zip(layers.parameters(), expected, strict=True)
    )


def test_a_large_gradient_is_sent_without_a_copy():
    seen, table = [], nn.Parameter(torch.zeros(400))
    average = AverageInBackward([table], may_lack=False)
    table.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    with average.during_backward():
        (table * torch.ones(400)).sum().backward()
    assert seen == [table.grad.data_ptr()]
