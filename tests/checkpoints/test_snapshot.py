import math

import pytest
import torch
from torch import nn

from cpt.checkpoints.snapshot import (
    HostCopies,
    NotFiniteError,
    bytes_in,
    changed_by_steps,
    memory_of,
    refuse_non_finite,
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


def test_large_weights_whose_sum_is_infinite_are_finite():
    refuse_non_finite(
        {
            "large": torch.full((4,), 3e38),
            "half": torch.full((4,), 6e4, dtype=torch.float16),
        }.items()
    )
