"""Order of copies and waits, and that pages change no number; on a CPU, with streams that run as late or as early as
they may."""

from contextlib import contextmanager

import pytest
import torch

from cpt.optim import adamw
from cpt.optim.adamw import OneKernelAdamW, Pages
from cpt.optim.adamw_update import adamw_update
from cpt.optim.gradients import ReleasedGradients


class LazyStream:
    """Runs what it was given when another stream's wait, or the end, needs it."""

    def __init__(self, name, log):
        self.name, self.log, self.work = name, log, []

    def record_event(self):
        return self, len(self.work)

    def wait_event(self, event):
        self.work.append(lambda: event[0].run_until(event[1]))
        self.log.append((self.name, "waits for", event[0].name))

    def run_until(self, end):
        for number in range(end):
            work, self.work[number] = self.work[number], None
            if work is not None:
                work()

    def synchronize(self):
        self.run_until(len(self.work))


class LazyStreams:
    """Three streams of which none does anything before somebody waits for it, or of which two copy as soon as they
    may."""

    are_early = False

    def __init__(self):
        self.log = []
        self.to_gpu, self.to_host, self.main = (LazyStream(name, self.log) for name in ("to_gpu", "to_host", "main"))
        self.active = self.main

    def current(self):
        return self.main

    @contextmanager
    def on(self, stream):
        before, self.active = self.active, stream
        yield
        self.active = before


@pytest.fixture
def lazy(monkeypatch):
    """Copies and updates join the queue of their stream."""
    streams = LazyStreams()

    def later(function, name):
        def called(*arguments, **options):
            streams.active.work.append(lambda: function(*arguments, **options))
            streams.log.append((streams.active.name, name))
            if streams.are_early and streams.active is not streams.main:
                streams.active.synchronize()

        return called

    own_copy = torch.Tensor.copy_

    def copied(target, source, non_blocking=False):
        return later(own_copy, "copies")(target, source) if non_blocking else own_copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(adamw, "adamw_update", later(adamw_update, "updates"))
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 512)
    monkeypatch.setattr(adamw, "FEWEST_IN_8_BIT", 512)
    return streams


def parameters(sizes=(5000, 300, 9000, 4096)):
    return [
        torch.nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(size)).bfloat16())
        for size in sizes
    ]


def optimizer_of(some, **changes):
    options = {
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "rounding": "stochastic",
        "eight_bit": True,
    }
    return OneKernelAdamW([{"params": some[:1], "is_embedding": True}, {"params": some[1:]}], **options | changes)


def gradient(parameter, step):
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)).bfloat16()


def train(some, optimizer, order, finish=lambda: None, count=4):
    """Steps whose gradients come in some order, each released after its update if `order` is given."""
    for step in range(count):
        finish()  # gradients are of a forward pass, which needs the weights
        if order is None:
            for parameter in some:
                parameter.grad = gradient(parameter, step)
            optimizer.step()
        else:
            released = ReleasedGradients(optimizer)
            released.begin(torch.tensor(step == 1))
            for number in order[step]:
                parameter = some[number]
                parameter.grad = gradient(parameter, step)
                kept = parameter.grad
                released.step_one(parameter)
                assert kept is not None
            released.remove()
    finish()


@pytest.mark.parametrize("are_early", [False, True])
@pytest.mark.parametrize("order", [None, [[3, 2, 1, 0]] * 4, [[3, 2, 1, 0], [0, 2], [2, 3, 1], [3, 0, 1, 2]]], ids=str)
def test_pages_change_no_number_however_late_or_early_the_streams_run(monkeypatch, lazy, are_early, order):
    here, paged = parameters(), parameters()
    lazy.are_early = are_early
    plain = optimizer_of(here, rounding="kahan")
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "adamw_update", adamw_update)
        train(here, plain, order)
    monkeypatch.setattr(adamw, "BUFFER", 11 * 4096)  # the embedding and the longest matrix need several pieces
    optimizer = optimizer_of(paged, rounding="kahan", paged=True)
    optimizer.pages = Pages(torch.device("cpu"), lazy)
    train(paged, optimizer, order, finish=lazy.main.synchronize)
    assert all(torch.equal(one, other) for one, other in zip(here, paged, strict=True))
    saved, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert saved.keys() == expected.keys()
    for number, state in saved.items():
        assert all(torch.equal(value, expected[number][name]) for name, value in state.items())
