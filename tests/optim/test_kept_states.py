import copy

import pytest
import torch

from cpt.errors import CheckpointError
from cpt.optim.kept_states import KeptStates


class Doubling(KeptStates):
    """Keeps an fp32 state beside each parameter, and doubles it."""

    def names(self, parameter, group):
        return {"kept"}

    def update(self, parameters, group):
        for parameter in parameters:
            state = self.state[parameter]
            state["kept"] = 2 * state.get("kept", torch.full((2,), 1.001))


def one(dtype=torch.bfloat16):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    return parameter, Doubling([{"params": [parameter]}], {"lr": 1.0})


def test_an_fp32_state_of_a_bfloat16_parameter_is_loaded_as_it_was():
    parameter, optimizer = one()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    again, loaded = one()
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert loaded.state[again]["kept"].dtype == torch.float32
    assert torch.equal(loaded.state[again]["kept"], torch.full((2,), 2.002))


def test_groups_come_with_it_and_a_parameter_without_a_gradient_is_left_alone():
    parameter, optimizer = one()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    again, loaded = one()
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.param_groups[0]["lr"] == 0.25 and loaded.param_groups[0]["params"] == [again]
    assert not loaded.state and not optimizer.state[parameter]


def test_a_closure_gives_the_loss():
    _, optimizer = one()
    assert optimizer.step(lambda: 3.0) == 3.0


def test_the_states_of_another_optimizer_are_refused_with_the_remedy():
    parameter, optimizer = one()
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(2)
    with pytest.raises(CheckpointError, match="keeps exp_avg, kept for a parameter, and Doubling keeps kept. Write name, rounding"):
        one()[1].load_state_dict(saved)
