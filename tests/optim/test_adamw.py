"""AdamW in little memory: its steps, its states, and states that wait in the host's memory."""

import io
from contextlib import contextmanager

import pytest
import torch
from tiny_training import learns_and_resumes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cpt.errors import CheckpointError, RecipeError
from cpt.optim import adamw
from cpt.optim.adamw import OneKernelAdamW, Pages
from cpt.optim.adamw_update import adamw_update
from cpt.optim.gradients import ReleasedGradients
from cpt.recipe.schema import Optimizer, Recipe

OF_TORCH = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KINDS = {
    "plain": ({"rounding": None, "eight_bit": False}, 12),  # bytes of states for each weight
    "8-bit, kahan": ({"rounding": "kahan", "eight_bit": True}, 4),
    "kahan": ({"rounding": "kahan", "eight_bit": False}, 10),
    "8-bit, stochastic": ({"rounding": "stochastic", "eight_bit": True}, 2),
    "stochastic": ({"rounding": "stochastic", "eight_bit": False}, 8),
}


def random(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def of(groups, **changes):
    return OneKernelAdamW(groups, **OF_TORCH | changes)


def matrix(dtype=torch.float32, size=8192):
    return torch.nn.Parameter(random(size).to(dtype))


def walk(parameter, optimizer, count=20):
    for number in range(count):
        parameter.grad = random(parameter.shape, 100 + number).to(parameter.dtype)
        optimizer.step()
    return parameter.detach().clone()


def test_fp32_weights_go_where_torchs_own_adamw_takes_them():
    mine, theirs = matrix(), matrix()
    expected = walk(theirs, torch.optim.AdamW([theirs], fused=True, **OF_TORCH))
    torch.testing.assert_close(walk(mine, of([{"params": [mine]}])), expected, rtol=1e-5, atol=1e-6)


# A rate of continued pre-training: 100 updates of a weight of 0.02 move it by less than a bfloat16 can show at once.
SMALL = {"lr": 1e-5, "weight_decay": 0.0}


def pulled(dtype, make):
    """How far weights of a usual size go that are pulled one way, a little at each of 60 steps."""
    start = torch.linspace(0.01, 0.04, 512).to(torch.bfloat16)
    weights = torch.nn.Parameter(start.to(dtype, copy=True))
    optimizer = make([{"params": [weights]}])
    for _ in range(60):
        weights.grad = torch.ones_like(weights)
        optimizer.step()
    return (weights.detach().float() - start.float()).mean().item()


@pytest.mark.parametrize("rounding", [None, "kahan", "stochastic"])
def test_small_updates_are_lost_in_bfloat16_and_arrive_by_each_way(rounding):
    whole = pulled(torch.float32, lambda groups: of(groups, **SMALL))
    assert whole == pytest.approx(-60 * 1e-5, rel=0.05)
    assert pulled(torch.bfloat16, lambda groups: torch.optim.AdamW(groups, **SMALL)) > 0.2 * whole
    found = pulled(torch.bfloat16, lambda groups: of(groups, **SMALL, rounding=rounding))
    assert found == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(
    "changes", [{"rounding": "kahan"}, {"rounding": None}, {"eight_bit": False}]
)
def test_states_of_another_way_to_save_memory_are_refused(changes):
    options = {"rounding": "stochastic", "eight_bit": True}
    parameter, other = matrix(torch.bfloat16), matrix(torch.bfloat16)
    optimizer = of([{"params": [parameter]}], **options)
    walk(parameter, optimizer, 1)
    with pytest.raises(CheckpointError, match="`optimizer`"):
        of([{"params": [other]}], **options | changes).load_state_dict(optimizer.state_dict())


def test_embeddings_and_small_parameters_keep_fp32_moments():
    embedding, norm, weight = matrix(), matrix(size=64), matrix()
    optimizer = of(
        [{"params": [embedding], "is_embedding": True}, {"params": [norm, weight]}], eight_bit=True
    )
    types = []
    for parameter in (embedding, norm, weight):
        walk(parameter, optimizer, 1)
        types.append(optimizer.state[parameter]["exp_avg"].dtype)
    assert types == [torch.float32, torch.float32, torch.uint8]


@pytest.mark.parametrize(
    ("name", "size", "dtype", "is_host"),
    [
        ("embedding", 100_000, torch.float32, True),
        ("weight", 100_000, torch.uint8, True),
        ("weight", 99_999, torch.uint8, False),
        ("weight", 4096, torch.uint8, False),
        ("weight", 4095, torch.float32, False),
    ],
)
def test_parameters_from_a_size_on_have_8_bit_and_wait_on_the_host(name, size, dtype, is_host):
    parameter = matrix(torch.bfloat16, size)
    group = {"params": [parameter], **({"is_embedding": True} if name == "embedding" else {})}
    optimizer = of([group], rounding="kahan", eight_bit=True, paged=True)
    walk(parameter, optimizer, 1)
    assert optimizer.state[parameter]["exp_avg"].dtype == dtype
    assert optimizer.is_on_host(parameter) is is_host
    assert not of([group], rounding="kahan", eight_bit=True).is_on_host(parameter)
    scales = [value.shape for key, value in optimizer.state[parameter].items() if "scale" in key]
    assert scales == ([(-(-size // 256),)] * 2 if dtype == torch.uint8 else [])


@pytest.mark.parametrize(
    ("dtypes", "rounding", "has_master"),
    [
        ([torch.float32], None, False),
        ([torch.bfloat16], None, True),
        ([torch.float32, torch.bfloat16, torch.float32], None, True),
        ([torch.float16], None, True),
        ([torch.bfloat16], "stochastic", False),
        ([torch.bfloat16], "kahan", False),
    ],
)
def test_weights_in_half_precision_have_a_master_copy_unless_they_are_rounded(
    dtypes, rounding, has_master
):
    weights = [matrix(dtype, 300) for dtype in dtypes]
    optimizer = of([{"params": [weight]} for weight in weights], rounding=rounding)
    assert optimizer.has_master is has_master
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    expected = ["float32" not in str(dtype) and rounding is None for dtype in dtypes]
    assert ["master" in optimizer.state[weight] for weight in weights] == expected
    assert [type(weight.grad) for weight in weights] == [torch.Tensor] * len(weights)


def test_half_weights_with_8_bit_states_or_rounding_are_refused():
    for options in ({"rounding": "kahan"}, {"rounding": "stochastic", "eight_bit": True}):
        with pytest.raises(RecipeError, match="need `model.dtype` bfloat16 or float32"):
            of([{"params": [matrix(torch.float16)]}], **options)


def test_a_group_that_is_added_and_a_parameter_without_gradient_are_known_by_number():
    weights = [matrix(torch.bfloat16, size) for size in (300, 200, 100)]
    both, late = (
        of([{"params": list(weights[:count])}], rounding="stochastic") for count in (3, 2)
    )
    late.add_param_group({"params": weights[2:]})
    start = [weight.detach().clone() for weight in weights]
    found = []
    for optimizer in (both, late):
        for weight, value in zip(weights, start, strict=True):
            weight.data.copy_(value)
            weight.grad = torch.ones_like(weight)
        weights[1].grad = None
        optimizer.step()
        found.append([weight.detach().clone() for weight in weights])
        assert weights[1] not in optimizer.state and torch.equal(weights[1], start[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


TRAINING = {"bf16": True}


@pytest.mark.parametrize(
    ("sections", "machine", "dtype"),
    [
        ({}, {"on_gpu": True}, torch.bfloat16),
        ({}, {"on_gpu": False}, torch.float32),
        ({}, {"on_gpu": False, "deepspeed": True}, torch.bfloat16),
        ({"optimizer": {"name": "muon"}}, {"on_gpu": True}, torch.float32),
        ({"optimizer": {"name": "muon"}}, {"deepspeed": True}, torch.bfloat16),
        ({"training": {"bf16": True, "fsdp": "full_shard"}}, {"on_gpu": True}, torch.float32),
        (
            {"training": {"bf16": True, "parallelism_config": {"tp_size": 2}}},
            {"on_gpu": True},
            torch.float32,
        ),
        ({"model": {"path": "a/b", "lora": {}}}, {"on_gpu": False}, torch.bfloat16),
        ({"training": {}}, {"on_gpu": True, "deepspeed": True}, torch.float32),
    ],
)
def test_weights_are_in_half_precision_where_updates_use_an_fp32_copy(sections, machine, dtype):
    sources = {"sources": [{"path": "a/c"}], "sequence_length": 16}
    recipe = Recipe.model_validate(
        {
            "name": "r",
            "model": {"path": "a/b"},
            "data": sources,
            "training": TRAINING,
            "optimizer": {"name": "adamw"},
            "budget": {"tokens": 100},
            **sections,
        }
    )
    assert adamw.automatic_dtype(recipe, **{"deepspeed": False, "on_gpu": False} | machine) == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_states_take_the_bytes_that_are_planned(kind):
    parameter, (options, bytes_each) = matrix(torch.bfloat16), KINDS[kind]
    optimizer = of([{"params": [parameter]}], **options)
    walk(parameter, optimizer, 1)
    scales = 2 * 4 * 8192 / 256 if options["eight_bit"] else 0
    states = optimizer.state[parameter].values()
    assert sum(tensor.nbytes for tensor in states) == bytes_each * 8192 + scales + 4


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "rounding", "dtype"),
    [
        ("adamw", None, "float32"),
        ("adamw", None, "bfloat16"),
        ("adamw", "stochastic", "bfloat16"),
        ("adamw_8bit", "stochastic", "bfloat16"),
        ("paged_adamw_8bit", "kahan", "bfloat16"),
    ],
)
def test_it_learns_and_resumes_from_its_saved_state_bit_for_bit(monkeypatch, name, rounding, dtype):
    monkeypatch.setattr(adamw, "FEWEST_IN_8_BIT", 512)
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 512)
    options = {} if rounding is None else {"rounding": rounding}
    learns_and_resumes(Optimizer(name=name, learning_rate=1e-2, **options), dtype)


# --- pages: states that wait in the host's memory --------------------------------------------------------------------


class LazyStream:
    """Runs what it was given when another stream's wait, or the end, needs it."""

    def __init__(self):
        self.work = []

    def record_event(self):
        return self, len(self.work)

    def wait_event(self, event):
        self.work.append(lambda: event[0].run_until(event[1]))

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
        self.to_gpu, self.to_host, self.main = LazyStream(), LazyStream(), LazyStream()
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

    def later(function):
        def called(*arguments, **options):
            streams.active.work.append(lambda: function(*arguments, **options))
            if streams.are_early and streams.active is not streams.main:
                streams.active.synchronize()

        return called

    own_copy = torch.Tensor.copy_

    def copied(target, source, non_blocking=False):
        return later(own_copy)(target, source) if non_blocking else own_copy(target, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    monkeypatch.setattr(adamw, "adamw_update", later(adamw_update))
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 512)
    monkeypatch.setattr(adamw, "FEWEST_IN_8_BIT", 512)
    return streams


def train(optimizer, some, order, finish=lambda: None):
    """Four steps whose gradients come in some order, each released after its update if `order` is given."""
    for step in range(4):
        finish()  # gradients are of a forward pass, which needs the weights
        gradients = [random(parameter.shape, step).bfloat16() for parameter in some]
        if order is None:
            for parameter, gradient in zip(some, gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            continue
        released = ReleasedGradients(optimizer)
        released.begin(torch.tensor(step == 1))
        for number in order[step]:
            some[number].grad = gradients[number]
            released.step_one(some[number])
        released.remove()
    finish()


def with_parameters(**changes):
    some = [torch.nn.Parameter(random(size, size).bfloat16()) for size in (5000, 300, 9000, 4096)]
    groups = [{"params": some[:1], "is_embedding": True}, {"params": some[1:]}]
    return of(groups, lr=1e-2, rounding="kahan", eight_bit=True, **changes), some


def test_paged_states_of_several_dtypes_can_be_saved(monkeypatch):
    monkeypatch.setattr(adamw, "FEWEST_ON_HOST", 512)
    optimizer, some = with_parameters(paged=True)
    for parameter in some:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved, state = torch.load(file)["state"], optimizer.state_dict()["state"]
    assert all(
        torch.equal(saved[number][name], value)
        for number in state
        for name, value in state[number].items()
    )


BACKWARD, IRREGULAR = [[3, 2, 1, 0]] * 4, [[3, 2, 1, 0], [0, 2], [2, 3, 1], [3, 0, 1, 2]]


@pytest.mark.parametrize(
    ("order", "are_early"), [(None, False), (BACKWARD, True), (IRREGULAR, False), (IRREGULAR, True)]
)
def test_pages_change_no_number_however_late_or_early_the_streams_run(
    monkeypatch, lazy, are_early, order
):
    lazy.are_early = are_early
    plain, here = with_parameters()
    with monkeypatch.context() as patch:
        patch.setattr(adamw, "adamw_update", adamw_update)
        train(plain, here, order)
    monkeypatch.setattr(
        adamw, "BUFFER", 11 * 4096
    )  # the embedding and the longest matrix need several pieces
    optimizer, paged = with_parameters(paged=True)
    optimizer.pages = Pages(torch.device("cpu"), lazy)
    train(optimizer, paged, order, finish=lazy.main.synchronize)
    assert all(torch.equal(one, other) for one, other in zip(here, paged, strict=True))
    saved, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert saved.keys() == expected.keys()
    for number, state in saved.items():
        assert all(torch.equal(value, expected[number][name]) for name, value in state.items())


def test_pieces_take_turns_in_two_buffers_and_are_as_large_as_fits(monkeypatch, lazy):
    monkeypatch.setattr(adamw, "BUFFER", 2 * 4 * 4096 * 2 + 2 * 512)
    pages = Pages(torch.device("cpu"), lazy)
    arrays = {name: random(20_000) for name in ("exp_avg", "exp_avg_sq")}
    expected = {name: 2 * array for name, array in arrays.items()}
    places, buffers = [], []
    for _ in range(2):
        for first, end, here in pages.pieces(7, arrays):
            lazy.main.work.append(lambda here=here: [one.mul_(2**0.5) for one in here.values()])
            places.append((first, end))
            buffers.append(here["exp_avg"].untyped_storage().data_ptr())
    pages.wait()
    lazy.main.synchronize()
    pages.wait()
    assert places == [(0, 8192), (8192, 16384), (16384, 20_000)] * 2
    assert len(set(buffers)) == 2 and buffers[::2] == buffers[:1] * 3
    for name, array in arrays.items():
        torch.testing.assert_close(array, expected[name])


def test_no_copy_of_the_states_before_waits_when_others_are_loaded_or_saved(monkeypatch, lazy):
    plain, _ = with_parameters()
    optimizer, some = with_parameters(paged=True)
    monkeypatch.setattr(adamw, "host_memory", lambda size, _: torch.zeros(size, dtype=torch.uint8))
    optimizer.pages = Pages(torch.device("cpu"), lazy)
    train(optimizer, some, None)
    assert any(work is not None for work in lazy.to_host.work)
    optimizer.load_state_dict(plain.state_dict())
    assert [work for stream in (lazy.to_gpu, lazy.to_host) for work in stream.work if work] == []
    assert optimizer.pages is None and not optimizer.arenas


class Operators(TorchDispatchMode):
    """Counts the updates that torch's dispatcher sees."""

    def __init__(self):
        super().__init__()
        self.updates = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        self.updates += function is torch.ops.cpt.adamw_update.default
        return function(*arguments, **(options or {}))


def updated(parameter):
    """The optimizer after one step, and how many updates went through the dispatcher."""
    parameter.grad = torch.ones_like(parameter)
    optimizer = of([{"params": [parameter]}], rounding="stochastic")
    with Operators() as seen:
        optimizer.step()
    return optimizer, seen.updates


def test_a_kernel_is_launched_without_the_operator_and_updates_the_same(monkeypatch):
    plain, launched = (torch.nn.Parameter(random(300).bfloat16()) for _ in range(2))
    assert updated(plain)[1] == 1
    monkeypatch.setattr(adamw, "can_launch", lambda weights: type(weights) is torch.Tensor)
    assert updated(launched)[1] == 0
    assert torch.equal(plain, launched)


def test_no_kernel_is_launched_for_a_tensor_without_values():
    with FakeTensorMode():
        weights = torch.empty(300, device="cuda")
    assert weights.is_cuda and not adamw.can_launch(weights)


@pytest.mark.heavy
def test_a_compiled_update_holds_the_operator():
    parameter, graphs = torch.nn.Parameter(random(300).bfloat16()), []
    optimizer, _ = updated(parameter)

    def keep(graph, _):
        graphs.append(graph.code)
        return graph.forward

    step = torch.compile(
        lambda: optimizer.update(parameter, optimizer.state[parameter], optimizer.param_groups[0]),
        backend=keep,
    )
    with torch.no_grad():
        step()
    assert "cpt.adamw_update" in graphs[0]
