import pytest
import torch

from cpt.optim.adamw import adamw
from cpt.optim.build import offloaded_adamw, replay_step_counter


def steps_of(weight: torch.nn.Parameter, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        weight.grad = torch.sin(torch.arange(64.0) * (number + 1))
        optimizer.step()


def resumed_after(steps: int, *, replay: bool) -> torch.Tensor:
    """Weights after 40 steps, interrupted after `steps`."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    first = adamw([{"params": [weight]}], 1e-3, offloaded_adamw)
    steps_of(weight, first, range(steps))
    again = torch.nn.Parameter(weight.detach().clone())
    second = adamw([{"params": [again]}], 1e-3, offloaded_adamw)
    second.load_state_dict(first.state_dict())
    if replay:
        replay_step_counter(second, steps)
    steps_of(again, second, range(steps, 40))
    return again.detach()


@pytest.mark.long
def test_a_replayed_counter_makes_the_resumed_run_bit_equal_and_without_it_it_drifts():
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 64))
    steps_of(weight, adamw([{"params": [weight]}], 1e-3, offloaded_adamw), range(40))
    straight = weight.detach()
    assert all(torch.equal(resumed_after(steps, replay=True), straight) for steps in (1, 5, 10, 15, 20, 35))
    assert not all(torch.equal(resumed_after(steps, replay=False), straight) for steps in (5, 10, 15, 20, 35))
