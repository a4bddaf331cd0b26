"""AdamW over weights in half precision: its steps and its states."""

import pytest
import torch
from tiny_training import learns_and_resumes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cpt.errors import CheckpointError, RecipeError
from cpt.optim import adamw
from cpt.optim.adamw import OneKernelAdamW
from cpt.recipe.schema import Optimizer, Recipe

OF_TORCH = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
KINDS = {None: 12, "kahan": 10, "stochastic": 8}  # rounding -> bytes of states for each weight


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


@pytest.mark.parametrize("rounding", ["kahan", None])
def test_states_of_another_rounding_are_refused(rounding):
    parameter, other = matrix(torch.bfloat16), matrix(torch.bfloat16)
    optimizer = of([{"params": [parameter]}], rounding="stochastic")
    walk(parameter, optimizer, 1)
    with pytest.raises(CheckpointError, match="`optimizer`"):
        of([{"params": [other]}], rounding=rounding).load_state_dict(optimizer.state_dict())


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


def test_the_rounding_of_float16_weights_is_refused():
    with pytest.raises(RecipeError, match="needs `model.dtype` bfloat16 or float32"):
        of([{"params": [matrix(torch.float16)]}], rounding="kahan")


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


@pytest.mark.parametrize("rounding", KINDS)
def test_states_take_the_bytes_that_are_planned(rounding):
    parameter = matrix(torch.bfloat16)
    optimizer = of([{"params": [parameter]}], rounding=rounding)
    walk(parameter, optimizer, 1)
    states = optimizer.state[parameter].values()
    assert sum(tensor.nbytes for tensor in states) == KINDS[rounding] * 8192 + 4


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("rounding", "dtype"),
    [(None, "float32"), (None, "bfloat16"), ("stochastic", "bfloat16"), ("kahan", "bfloat16")],
)
def test_it_learns_and_resumes_from_its_saved_state_bit_for_bit(rounding, dtype):
    options = {} if rounding is None else {"rounding": rounding}
    learns_and_resumes(Optimizer(name="adamw", learning_rate=1e-2, **options), dtype)


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
