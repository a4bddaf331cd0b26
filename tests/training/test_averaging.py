"""Gradients averaged over processes while the backward pass runs."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from one_process_group import alone_in_a_group
from threads_as_ranks import on_ranks
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


class Expert(nn.Module):
    """Only vectors: ranks as threads compare shapes, and a missing gradient is a flat one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5))
        self.shift = nn.Parameter(torch.randn(5))

    def forward(self, hidden):
        return hidden * self.scale + self.shift


class Experts(nn.Module):
    """Layers of odd sizes between a tied embedding and head, and three experts."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, ids, experts):
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        for expert in experts:
            hidden = hidden + self.experts[expert](hidden)
        return (hidden @ self.embedding.weight.T).logsumexp(-1).mean()


def averaged_one_by_one(weights):
    """None where no rank has a gradient."""
    means = []
    for weight in weights:
        has = torch.tensor(int(weight.grad is not None))
        dist.all_reduce(has)
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        dist.all_reduce(gradient)
        means.append(gradient / dist.get_world_size() if has else None)
    return means


@pytest.mark.parametrize("bucket_bytes", [0, 4 * 40, 4 * 10_000])
@pytest.mark.parametrize(
    ("experts", "may_lack"),
    [
        (lambda rank, number: (0, 1, 2), False),
        (lambda rank, number: (rank,) if rank < 2 else (), True),
        (lambda rank, number: (0, 1, 2) if number == 0 else (0, 2), True),
        (lambda rank, number: (0, 1) if (rank, number) == (1, 2) else (0,), True),
    ],
    ids=["all", "one of two ranks", "of earlier micro-batches", "of one rank at the end"],
)
def test_three_ranks_have_the_mean_of_their_gradients(monkeypatch, bucket_bytes, experts, may_lack):
    monkeypatch.setattr(averaging, "BUCKET_BYTES", bucket_bytes)
    all_reduce = dist.all_reduce

    def reduce_numbers(tensor, *arguments, **options):
        assert tensor.dtype != torch.bool, "gloo cannot"
        return all_reduce(tensor, *arguments, **options)

    monkeypatch.setattr(dist, "all_reduce", reduce_numbers)
    torch.manual_seed(3)
    models = [Experts()]
    models += [copy.deepcopy(models[0]) for _ in range(5)]
    ids = torch.randint(11, (2, 3, 3, 2, 4))  # step, rank, micro-batch, rows, tokens

    def train(rank):
        model = models[2 * rank]
        other = models[2 * rank + 1]
        average = AverageInBackward(list(model.parameters()), may_lack=may_lack)
        pairs = []
        for of_step in ids:
            for number, batch in enumerate(of_step[rank]):
                used = experts(rank, number)
                other(batch, used).backward()
                if number < 2:
                    model(batch, used).backward()
                    continue
                with average.during_backward():
                    model(batch, used).backward()
            expected = averaged_one_by_one(list(other.parameters()))
            pairs += [
                (weight.grad, mean)
                for weight, mean in zip(model.parameters(), expected, strict=True)
            ]
            model.zero_grad()
            other.zero_grad()
        return pairs

    for pairs in on_ranks(3, train):
        assert len(pairs) == 26
        for gradient, mean in pairs:
            if mean is None:
                assert gradient is None
            else:
                torch.testing.assert_close(gradient, mean)
