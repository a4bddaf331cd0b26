import copy
from contextlib import contextmanager

import pytest
import torch
from tiny_training import learns_and_resumes

from cpt.errors import CheckpointError
from cpt.optim import adamw
from cpt.optim.adamw import OneKernelAdamW, Pages
from cpt.optim.adamw_update import adamw_update
from cpt.optim.gradients import ReleasedGradients
from cpt.recipe.schema import Optimizer

KINDS = [
    {"rounding": rounding, "eight_bit": eight_bit}
    for rounding in (None, "kahan", "stochastic")
    for eight_bit in (False, True)
]
# a rate of continued pre-training: 100 updates of a weight of 0.02 move it by less than a bfloat16 can show at once
SMALL = 1e-5


def of(groups, **changes):
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    return OneKernelAdamW(groups, **options | changes)


def matrix(dtype=torch.float32, seed=0, size=8192):
    return torch.nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype))


def walk(parameter, optimizer, count=20):
    for number in range(count):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + number)).to(
            parameter.dtype
        )
        optimizer.step()
    return parameter.detach().clone()


def torchs(parameter, **changes):
    return torch.optim.AdamW(
        [parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True, **changes
    )


def test_fp32_weights_go_where_torchs_and_bitsandbytes_own_adamw_take_them():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    mine, in_8_bit, theirs, whole = (matrix() for _ in range(4))
    exact = walk(whole, torchs(whole))
    torch.testing.assert_close(walk(mine, of([{"params": [mine]}])), exact, rtol=1e-5, atol=1e-6)
    found = (walk(in_8_bit, of([{"params": [in_8_bit]}], eight_bit=True)) - exact).abs()
    expected = walk(
        theirs, bitsandbytes.optim.AdamW8bit([theirs], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    )
    assert found.mean() < 1.1 * (expected - exact).abs().mean() and found.max() < 2e-2


def pulled(dtype, make, count=60):
    """Weights of a usual size that are pulled one way, a little at each step."""
    start = torch.linspace(0.01, 0.04, 512).to(torch.bfloat16)
    weights = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make([{"params": [weights]}])
    for _ in range(count):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    return (weights.detach().float() - start.float()).mean().item()


@pytest.mark.parametrize("rounding", [None, "kahan", "stochastic"])
def test_small_updates_are_lost_in_bfloat16_and_arrive_by_each_way(rounding):
    whole = pulled(torch.float32, lambda groups: of(groups, lr=SMALL, weight_decay=0.0))
    assert whole == pytest.approx(-60 * SMALL, rel=0.05)
    assert pulled(torch.bfloat16, lambda groups: torch.optim.AdamW(groups, lr=SMALL, weight_decay=0.0)) > 0.2 * whole
    found = pulled(torch.bfloat16, lambda groups: of(groups, lr=SMALL, weight_decay=0.0, rounding=rounding))
    assert found == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_flag_on_the_device_leaves_weights_and_states_as_they_were(kind, dtype):
    parameter = matrix(dtype)
    optimizer = of([{"params": [parameter]}], **kind)
    before = walk(parameter, optimizer, 3)
    states = copy.deepcopy(dict(optimizer.state[parameter]))
    optimizer.found_inf = torch.ones(())
    parameter.grad.fill_(torch.nan)
    optimizer.step()
    assert torch.equal(parameter, before)
    assert all(torch.equal(value, states[name]) for name, value in optimizer.state[parameter].items())
    optimizer.found_inf = torch.zeros(())
    assert not torch.equal(walk(parameter, optimizer, 1), before) and optimizer.state[parameter]["step"] == 4


def walk_states(parameter, optimizer):
    walk(parameter, optimizer, 1)
    return optimizer.state[parameter]


@pytest.mark.parametrize("changes", [{"rounding": "kahan"}, {"rounding": None}, {"eight_bit": False}])
def test_states_of_another_way_to_save_memory_are_refused(changes):
    options = {"rounding": "stochastic", "eight_bit": True}
    parameter, other = matrix(torch.bfloat16), matrix(torch.bfloat16)
    optimizer = of([{"params": [parameter]}], **options)
    walk(parameter, optimizer, 1)
    with pytest.raises(CheckpointError, match="`optimizer`"):
        of([{"params": [other]}], **options | changes).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("paged", [False, True])
def test_states_are_loaded_as_they_were_saved_with_their_groups(monkeypatch, paged):
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 512)
    parameter, again = matrix(torch.bfloat16), matrix(torch.bfloat16)
    optimizer, loaded = (
        of([{"params": [p]}], rounding="kahan", eight_bit=True, paged=paged) for p in (parameter, again)
    )
    walk(parameter, optimizer, 2)
    walk(again, loaded, 1)
    optimizer.param_groups[0]["lr"] = 0.25
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.param_groups[0]["lr"] == 0.25
    for name, value in optimizer.state[parameter].items():
        assert torch.equal(loaded.state[again][name], value) and loaded.state[again][name].dtype == value.dtype


def test_embeddings_and_small_parameters_keep_fp32_moments():
    embedding, norm, weight = matrix(), matrix(size=64), matrix()
    optimizer = of([{"params": [embedding], "is_embedding": True}, {"params": [norm, weight]}], eight_bit=True)
    types = [walk_states(parameter, optimizer)["exp_avg"].dtype for parameter in (embedding, norm, weight)]
    assert types == [torch.float32, torch.float32, torch.uint8]


@pytest.mark.parametrize(
    ("kind", "bytes_each"), [(KINDS[0], 12), (KINDS[3], 4), (KINDS[5], 2), (KINDS[4], 8)], ids=str
)
def test_states_take_the_bytes_that_are_planned(kind, bytes_each):
    parameter = matrix(torch.bfloat16)
    states = walk_states(parameter, of([{"params": [parameter]}], **kind))
    scales = 2 * 4 * 8192 / 256 if kind["eight_bit"] else 0
    assert sum(tensor.nbytes for tensor in states.values()) == bytes_each * 8192 + scales + 4


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_it_learns_and_resumes_from_its_saved_state_bit_for_bit(monkeypatch, name, rounding):
    monkeypatch.setattr(adamw, "FEWEST_IN_8_BIT", 512)
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 512)
    learns_and_resumes(Optimizer(name=name, learning_rate=1e-2, rounding=rounding), "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_adamw_learns_and_resumes_bit_for_bit(dtype):
    learns_and_resumes(Optimizer(name="adamw", learning_rate=5e-3), dtype)


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
