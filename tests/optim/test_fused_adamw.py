from copy import deepcopy

import pytest
import torch
from torch import nn

from cpt.optim.fused_adamw import FusedAdamW

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}


def two_of(model: nn.Module) -> tuple[nn.Module, FusedAdamW, nn.Module, torch.optim.AdamW]:
    other = deepcopy(model)

    def groups(of: nn.Module) -> list[dict[str, object]]:
        matrices = [parameter for parameter in of.parameters() if parameter.dim() > 1]
        return [{"params": matrices}, {"params": [p for p in of.parameters() if p.dim() == 1], "weight_decay": 0.0}]

    ours = FusedAdamW(groups(model), weight_decay=0.1, **OPTIONS)
    return model, ours, other, torch.optim.AdamW(groups(other), weight_decay=0.1, fused=True, **OPTIONS)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.Linear(16, 3))


def train(
    of: nn.Module, optimizer: torch.optim.Optimizer, steps: range, *, scale: float | None = None, skipped: tuple[int, ...] = ()
) -> None:
    for step in steps:
        torch.manual_seed(step)
        of(torch.randn(5, 7)).square().sum().backward()
        if scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(float(step in skipped))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


def same(of: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(of.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("scale", [None, 1.0, 3.7])
def test_steps_are_torchs_own_bit_for_bit(scale, monkeypatch) -> None:
    of, ours, other, torchs = two_of(model())
    train(of, ours, range(1), scale=scale)
    with monkeypatch.context() as patch:  # from the second step on nothing of torch's preparations is called
        patch.setattr(torch.optim.AdamW, "_init_group", lambda *_: pytest.fail("prepared again"))
        train(of, ours, range(1, 12), scale=scale, skipped=(3, 4))
    train(other, torchs, range(12), scale=scale, skipped=(3, 4))
    assert same(of, other)
    for mine, theirs in zip(ours.state.values(), torchs.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq", "step"))
    assert ours.state[next(of.parameters())]["step"] == (12 if scale is None else 10)


def test_it_goes_on_from_a_state_of_torchs_and_the_other_way_round() -> None:
    of, ours, other, torchs = two_of(model())
    train(of, ours, range(4))
    train(other, torchs, range(4))
    saved, theirs = deepcopy(ours.state_dict()), deepcopy(torchs.state_dict())
    ours.load_state_dict(theirs)
    torchs.load_state_dict(saved)
    train(of, ours, range(4, 9))
    train(other, torchs, range(4, 9))
    assert same(of, other)


def test_a_missing_gradient_leaves_its_parameter_alone() -> None:
    of, ours, _, _ = two_of(model())
    train(of, ours, range(3))
    of(torch.randn(5, 7)).sum().backward()
    first, second = list(of.parameters())[:2]
    first.grad = None
    before, moved = first.detach().clone(), second.detach().clone()
    ours.step()
    assert torch.equal(first, before)
    assert not torch.equal(second, moved)


def test_a_closure_is_called() -> None:
    of, ours, _, _ = two_of(model())
    train(of, ours, range(3))
    assert ours.step(lambda: 5) == 5


def test_weights_of_two_types_and_options_without_a_kernel_are_torchs() -> None:
    of = model()
    of[2].double()
    optimizer = FusedAdamW([{"params": list(of.parameters())}], weight_decay=0.1, **OPTIONS)
    for parameter in of.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert optimizer.prepared is None
    before = of[2].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(of[2].weight, before)


def test_a_group_that_joins_later_is_trained() -> None:
    of, ours, _, _ = two_of(model())
    train(of, ours, range(3))
    late = nn.Parameter(torch.zeros(3))
    ours.add_param_group({"params": [late]})
    late.grad = torch.ones(3)
    train(of, ours, range(3, 4))
    assert late.abs().sum() > 0
