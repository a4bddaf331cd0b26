import math
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from cpt.checkpoints.snapshot import (
    HostCopies,
    NotFiniteError,
    bytes_in,
    changed_by_steps,
    copy_beside_training,
    memory_of,
    refuse_non_finite,
    saved_parameters,
)


def test_views_of_one_memory_are_views_of_one_copy():
    flat = torch.arange(6.0)
    copied = HostCopies().copy({"first": flat[:2], "matrix": flat[2:].view(2, 2).t(), "tied": flat})
    assert torch.equal(copied["matrix"], flat[2:].view(2, 2).t()) and copied["matrix"].stride() == (
        1,
        2,
    )
    assert (
        len({memory_of(tensor) for tensor in copied.values()}) == 1
        and bytes_in(copied) == bytes_in(flat) == 24
    )


def test_what_no_step_changes_is_not_copied():
    frozen, trained = torch.ones(2), torch.ones(2)
    copied = HostCopies().copy([frozen, trained], changing=lambda tensor: tensor is trained)
    assert copied[0] is frozen and copied[1] is not trained


def test_the_memory_of_one_checkpoint_takes_the_next():
    copies, state = HostCopies(), {"a": torch.ones(1000), "b": torch.ones(10)}
    assert copies.missing(state) == 4040
    first = memory_of(copies.copy(state)["a"])
    copies.release()
    assert copies.missing(state) == 0
    assert memory_of(copies.copy({"a": torch.zeros(1000)})["a"]) == first
    assert copies.missing(state) == 4000, "one buffer is in use, the other one waits"


@torch.no_grad()
def test_each_checkpoint_holds_the_weights_of_its_own_step():
    weights = [nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(3), requires_grad=False)]
    copies, stored = HostCopies(), []
    for _ in range(3):
        for number, weight in enumerate(weights):
            weight.add_(number + 1)
        copied = copies.copy({"now": weights, "again": (weights[0], "a text", 3)})
        for weight in weights:
            weight.add_(100)
        stored.append([weight.tolist() for weight in copied["now"]])
        assert copied["again"][0] is copied["now"][0] and copied["again"][1:] == ("a text", 3)
        assert [type(weight) for weight in copied["now"]] == [nn.Parameter, nn.Parameter]
        assert [weight.requires_grad for weight in copied["now"]] == [True, False]
        copies.release()
        for weight in weights:
            weight.sub_(100)
    assert stored == [[[step] * 5, [2 * step] * 3] for step in (1, 2, 3)]


class Special(torch.Tensor):
    """As quantized weights are."""

    def __deepcopy__(self, memo):
        return self.clone().as_subclass(Special)


def test_a_copy_is_not_copied_again_and_what_is_empty_or_of_another_class_is_kept():
    copies, state = HostCopies(), {"a": torch.arange(7.0, dtype=torch.float64)[2:]}
    once = copies.copy(state)
    assert copies.copy({**once, "b": torch.ones(2)})["a"] is once["a"]
    assert once["a"].tolist() == [2, 3, 4, 5, 6] and once["a"].dtype == torch.float64
    special = torch.ones(3).as_subclass(Special)
    copied = copies.copy([torch.empty(0, 3, dtype=torch.int16), special])
    assert copied[0].shape == (0, 3) and copied[0].dtype == torch.int16
    assert type(copied[1]) is Special and memory_of(copied[1]) != memory_of(special)
    assert torch.equal(copied[1], special)


def test_an_adapters_checkpoint_holds_what_is_trained_and_a_models_all_that_it_saves():
    adapter = tiny_model("llama", lora={"r": 3})
    trained = sum(one.numel() for one in adapter.parameters() if one.requires_grad)
    assert 0 < sum(numbers for _, numbers in saved_parameters(adapter)) == trained
    model = tiny_model("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    model._keys_to_ignore_on_save = {"model.norm.weight"}
    saved = {id(parameter) for parameter, _ in saved_parameters(model)}
    left_out = [name for name, one in model.named_parameters() if id(one) not in saved]
    assert left_out == ["model.norm.weight"]


def test_steps_change_trained_parameters_and_buffers():
    model = nn.Sequential(
        nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2, bias=False)
    )
    model[2].weight.requires_grad_(False)
    changing = changed_by_steps(model)
    assert memory_of(model[0].weight) in changing and memory_of(model[1].running_mean) in changing
    assert memory_of(model[2].weight) not in changing


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(broken):
    weights = {
        "sound": torch.ones(3),
        "head": torch.tensor([1.0, broken]),
        "ids": torch.tensor([2]),
    }
    with pytest.raises(NotFiniteError, match="NaN or infinity: head$"):
        refuse_non_finite(weights.items())
    more = {name: torch.tensor([broken]) for name in "abcde"}
    with pytest.raises(NotFiniteError, match="infinity: a, b, c and 2 more$"):
        refuse_non_finite(more.items())
    more = {name: torch.tensor([broken]) for name in "abc"}
    with pytest.raises(NotFiniteError, match="infinity: a, b, c$"):
        refuse_non_finite(more.items())


def test_large_weights_whose_sum_is_infinite_are_finite():
    refuse_non_finite(
        {
            "large": torch.full((4,), 3e38),
            "half": torch.full((4,), 6e4, dtype=torch.float16),
        }.items()
    )


def test_what_overflows_is_checked_number_by_number_and_nothing_else(monkeypatch):
    """A boolean for each number takes memory: only where the sum is not finite."""
    checked = []
    own = torch.Tensor.isfinite

    def isfinite(values):
        checked.append(values.numel())
        return own(values)

    monkeypatch.setattr(torch.Tensor, "isfinite", isfinite)
    large = torch.full((3,), 3e38)
    refuse_non_finite({"a": torch.ones(5), "large": large, "ids": torch.ones(7).int()}.items())
    assert checked == [1, 1, 3]


def test_deepspeeds_parts_of_a_parameter_change_with_it():
    model = nn.Linear(3, 5)
    model.weight.ds_tensor = torch.ones(4)
    model.weight.ds_numel = 77
    model.bias.ds_tensor = torch.ones(2)
    model.bias.requires_grad_(False)
    changing = changed_by_steps(model)
    assert changing == {memory_of(model.weight), memory_of(model.weight.ds_tensor)}
    assert [numbers for _, numbers in saved_parameters(model)] == [77, 5]


def test_copies_wait_on_a_stream_of_their_own_for_what_was_computed(monkeypatch):
    done = []
    gpu = SimpleNamespace(index=3)

    class Stream:
        def __init__(self, device):
            done.append(("stream", device))

        def wait_event(self, event):
            done.append(("waits for", event))

    monkeypatch.setattr(torch, "Stream", Stream)
    for name in ("set_device_index", "set_stream"):
        monkeypatch.setattr(
            torch.accelerator, name, lambda value, name=name: done.append((name, value))
        )
    copy_beside_training(None)
    assert done == []
    moment = SimpleNamespace(device=gpu)
    copy_beside_training(moment)
    (_, stream) = done.pop()
    assert isinstance(stream, Stream)
    assert done == [("set_device_index", 3), ("stream", gpu), ("waits for", moment)]
