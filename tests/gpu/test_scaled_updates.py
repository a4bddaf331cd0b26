"""AdamW on a CUDA GPU with gradients that are scaled on the device, and with a step that is skipped there."""

import pytest
import torch
from gpu_device import DEVICE
from torch import nn

from cpt.optim.build import build_optimizer
from cpt.recipe.schema import Optimizer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("name", "dtype", "within"),
    [("adamw", torch.float32, 1e-5), ("adamw", torch.bfloat16, 1e-5), ("adamw_8bit", torch.bfloat16, 0.05)],
)
def test_scaled_and_skipped_updates_are_those_of_the_cpu(name, dtype, within):
    changes = []
    for device in ("cpu", DEVICE):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.LayerNorm(512), nn.Linear(512, 64)).to(device, dtype)
        optimizer = build_optimizer(
            Optimizer(name=name, learning_rate=1e-2, rounding=None if name == "adamw" else "kahan"), model
        )
        weights = [{name: parameter.detach().clone() for name, parameter in model.named_parameters()}]
        for step in range(4):
            draw = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(device, dtype)
            optimizer.grad_scale = torch.tensor(3.7, device=device)
            optimizer.found_inf = torch.tensor(float(step == 2), device=device)
            optimizer.step()
            weights.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        assert all(torch.equal(weights[2][name], weights[3][name]) for name in weights[0]), "the third step is skipped"
        changes.append({name: (weights[4][name].double() - weights[0][name].double()).cpu() for name in weights[0]})
    for name, change in changes[0].items():
        rounding = 0 if dtype == torch.float32 else 2**-9
        assert (changes[1][name] - change).norm() < (within + rounding) * change.norm()
