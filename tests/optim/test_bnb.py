"""bitsandbytes' optimizers by transformers' names: what they mean, and what cpt adds. Needs bitsandbytes."""

import io

import pytest
import torch
from tiny_training import learns_and_resumes, steps, tiny_llama
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_optimizer import _BITSANDBYTES_OPTIMIZERS

from cpt.errors import CheckpointError
from cpt.optim import bnb
from cpt.optim.bnb import accepts_fp32_gradients
from cpt.optim.build import OPTIMIZERS, build_optimizer, facts_of
from cpt.optim.gradients import ReleasedGradients
from cpt.recipe.schema import Optimizer

pytestmark = pytest.mark.quantized
NAMES = [name for name, facts in OPTIMIZERS.items() if "bnb" in facts.build.__name__]
RATES = {"lion": 1e-3}  # others: 1e-2


def section(name, **options):
    rate = next((rate for part, rate in RATES.items() if part in name), 1e-2)
    return Optimizer(name=name, learning_rate=rate, **options)


def test_every_name_of_transformers_is_built_in():
    assert sorted(NAMES) == sorted(name.value for name in _BITSANDBYTES_OPTIMIZERS)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_means_the_class_bits_and_pages_of_transformers(tmp_path, name):
    arguments = TrainingArguments(output_dir=tmp_path, optim=name, use_cpu=True)
    expected_class, expected = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = build_optimizer(section(name), tiny_llama())
    assert isinstance(optimizer, expected_class)
    assert optimizer.args.optim_bits == expected["optim_bits"]
    assert optimizer.is_paged is expected.get("is_paged", False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_it_learns_and_resumes_from_its_saved_state_bit_for_bit(monkeypatch, name, dtype):
    monkeypatch.setattr(bnb, "AT_ONCE", 1024)
    learns_and_resumes(section(name), dtype)


@pytest.mark.parametrize(
    ("name", "rounding", "dtype"),
    [("adamw_8bit", "stochastic", "float32"), ("adamw_8bit", None, "bfloat16")],
)
def test_steps_are_those_of_bitsandbytes_alone(name, rounding, dtype):
    from bitsandbytes.optim import AdamW8bit, GlobalOptimManager

    ours, theirs = tiny_llama(dtype), tiny_llama(dtype)
    optimizer = build_optimizer(section(name, rounding=rounding, weight_decay=0.0), ours)
    embedding = theirs.get_input_embeddings()
    manager = GlobalOptimManager.get_instance()
    manager.register_module_override(embedding, "weight", {"optim_bits": 32})  # as transformers
    alone = AdamW8bit(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    assert steps(ours, optimizer, 4) == steps(theirs, alone, 4)
    manager.initialize()
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def weights_of(*sizes, dtype=torch.bfloat16):
    draw = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=draw).to(dtype)) for size in sizes]


def built(weights, name="adamw_8bit", **options):
    groups = [{"params": weights[:1], "is_embedding": True}, {"params": weights[1:]}]
    return OPTIMIZERS[name].build(groups, 1e-2, **options)


def update(optimizer, weights, seed=0):
    for number, weight in enumerate(weights):
        draw = torch.Generator().manual_seed(100 * seed + number)
        weight.grad = torch.randn(weight.shape, generator=draw).to(weight.dtype)
    optimizer.step()


def test_embeddings_and_small_parameters_have_fp32_states():
    weights = weights_of(8192, 4095, 4096)
    optimizer = built(weights)
    update(optimizer, weights)
    types = [optimizer.state[weight]["state1"].dtype for weight in weights]
    assert types == [torch.float32, torch.float32, torch.uint8]


@pytest.mark.parametrize("name", NAMES)
def test_states_take_the_bytes_that_are_planned(name):
    weights = weights_of(16, 2**20)
    optimizer = built(weights, name)
    if optimizer.is_paged:  # pages of AdEMAMix need a GPU
        optimizer.is_paged = False
    update(optimizer, weights)
    facts = facts_of(name)
    states = optimizer.state[weights[1]].items()
    state_bytes = sum(value.nbytes for key, value in states if key[:5] in ("state", "absma"))
    assert state_bytes == facts.moments * facts.moment_bytes * 2**20


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_32bit"])
def test_updates_in_parts_are_those_of_whole_parameters_but_for_the_noise(monkeypatch, name):
    exact, whole, parts = (weights_of(5000, 5000) for _ in range(3))
    exact = [nn.Parameter(weight.detach().float()) for weight in exact]
    optimizers = [built(weights, name) for weights in (exact, whole, parts)]
    for seed in range(3):
        update(optimizers[1], whole, seed)
        with monkeypatch.context() as patch:
            patch.setattr(bnb, "AT_ONCE", 2048)
            update(optimizers[2], parts, seed)
        for weight, reference in zip(exact, whole, strict=True):
            weight.grad = reference.grad.float()
        optimizers[0].step()
    for weight, other, reference in zip(whole, parts, exact, strict=True):
        rounded_thrice = 3 * (reference.detach().abs() + 3e-2) * 2**-7
        assert ((weight - reference).abs() <= rounded_thrice).all()
        assert ((other - reference).abs() <= rounded_thrice).all()
        states = (optimizers[1].state[weight], optimizers[2].state[other])
        assert all(torch.equal(states[0][key], states[1][key]) for key in ("state1", "state2"))
        assert states[0]["step"] == states[1]["step"] == 3


@pytest.mark.parametrize(("rounding", "share"), [("stochastic", 1.0), (None, 0.2)])
def test_small_updates_arrive_with_stochastic_rounding_and_are_lost_without(rounding, share):
    start = torch.linspace(0.01, 0.04, 8192).to(torch.bfloat16)
    weights = [nn.Parameter(torch.zeros(1)), nn.Parameter(start.clone())]
    optimizer = built(weights, rounding=rounding, weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 1e-5
    for _ in range(60):
        weights[1].grad = torch.ones_like(start)
        optimizer.step()
    moved = (weights[1].detach().float() - start.float()).mean().item() / (-60 * 1e-5)
    assert moved == pytest.approx(1.0, rel=0.05) if rounding else moved < share


def test_gradients_may_be_fp32_only_if_weights_are_rounded():
    weights = weights_of(16, 5000)
    assert accepts_fp32_gradients(built(weights))
    assert not accepts_fp32_gradients(built(weights, rounding=None))
    assert not accepts_fp32_gradients(built(weights, "lion_8bit"))
    in_half, in_fp32 = weights, weights_of(16, 5000)
    for weight in in_fp32:
        weight.grad_dtype = torch.float32
    for some in (in_half, in_fp32):
        optimizer = built(some)
        for weight in some:
            weight.grad = torch.full(weight.shape, 0.5, dtype=weight.grad_dtype)
        optimizer.step()
    assert all(map(torch.equal, in_half, in_fp32))


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_released_gradients_give_the_same_steps_and_a_bad_one_changes_nothing(name):
    whole, parts = weights_of(5000, 300, 5000), weights_of(5000, 300, 5000)
    plain, optimizer = built(whole, name), built(parts, name)
    released = ReleasedGradients(optimizer)
    for seed in range(4):
        is_skipped = seed == 2
        released.begin(torch.tensor(is_skipped))
        if not is_skipped:
            update(plain, whole, seed)
        for number in (2, 0, 1):
            draw = torch.Generator().manual_seed(100 * seed + number)
            gradient = torch.randn(parts[number].shape, generator=draw).bfloat16()
            (parts[number] * gradient).sum().backward()
            assert parts[number].grad is None
    released.remove()
    assert all(map(torch.equal, whole, parts))
    saved, expected = optimizer.state_dict()["state"], plain.state_dict()["state"]
    for number, state in expected.items():
        assert state["step"] == saved[number]["step"] == 3
        for key, value in state[bnb.QUANTIZED].items():
            assert torch.equal(value, saved[number][bnb.QUANTIZED][key])


def test_a_released_gradient_that_is_not_finite_leaves_its_parameter():
    weights = weights_of(16, 5000)
    optimizer = built(weights)
    released = ReleasedGradients(optimizer)
    before = weights[1].detach().clone()
    released.begin(None)
    (weights[1] * torch.inf).sum().backward()
    (weights[0] * 1.0).sum().backward()
    assert torch.equal(weights[1], before) and not optimizer.state[weights[1]]
    assert optimizer.state[weights[0]]["step"] == 1 and not released.norm().isfinite()


def paged(optimizer):
    """Mark states as `get_paged` of bitsandbytes does, which needs a GPU."""
    for state in optimizer.state.values():
        for name in ("state1", "state2"):
            state[name].is_paged = True
            state[name].page_deviceid = 0


def test_states_that_are_marked_as_paged_are_saved_and_loaded_as_data():
    weights, others = weights_of(5000, 5000), weights_of(5000, 5000)
    optimizer, loaded = built(weights), built(others)
    update(optimizer, weights)
    paged(optimizer)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for weight, other in zip(weights, others, strict=True):
        states = (optimizer.state[weight], loaded.state[other])
        assert torch.equal(states[0]["state1"], states[1]["state1"])
        assert not hasattr(states[1]["state1"], "is_paged")


def test_parts_of_paged_states_are_marked_too():
    weights = weights_of(5000, 5000)
    optimizer = built(weights)
    update(optimizer, weights)
    paged(optimizer)
    parts = dict(bnb.part_of_state(optimizer.state[weights[1]], 1024, 2048))
    assert parts["state1"].is_paged and len(parts["state1"]) == 1024
    assert len(parts["absmax1"]) == 4 and len(parts["qmap1"]) == 256
    assert parts["state1"].data_ptr() == optimizer.state[weights[1]]["state1"].data_ptr() + 1024


def test_large_states_of_a_gpu_are_paged_again_when_they_are_loaded(monkeypatch):
    import bitsandbytes.functional

    def get_paged(*shape, dtype, device):
        pages = torch.zeros(shape, dtype=dtype)
        pages.is_paged = device.type == "meta"
        return pages

    monkeypatch.setattr(bitsandbytes.functional, "get_paged", get_paged)
    optimizer = built(weights_of(16, 16), "paged_adamw_8bit")

    class OnGpu(torch.Tensor):
        is_cuda = True

    for size, is_paged in ((100_000, True), (99_999, False)):
        weight = torch.empty(size, device="meta").as_subclass(OnGpu)
        saved = torch.ones(size, dtype=torch.uint8)
        state = optimizer.place(weight, "state1", saved)
        assert vars(state).get("is_paged", False) is is_paged
        assert (state.device.type == "cpu") is is_paged
        assert not is_paged or torch.equal(state, saved)
        assert not vars(optimizer.place(weight, "absmax1", saved))


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (("exp_avg", "exp_avg_sq"), "--new"),
        (("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"), "cpt export RUN"),
    ],
)
def test_states_of_another_optimizer_are_refused_with_what_to_do(names, remedy):
    weights = weights_of(16, 5000)
    optimizer = built(weights)
    state = {"step": torch.ones(()), **{name: torch.zeros(5000) for name in names}}
    saved = {**optimizer.state_dict(), "state": {1: state}}
    with pytest.raises(CheckpointError, match=remedy):
        optimizer.load_state_dict(saved)
