import pytest
import torch
from tiny_training import learns_and_resumes

from cpt.optim.build import shampoo, soap
from cpt.recipe.schema import Optimizer


@pytest.mark.parametrize(("name", "rate"), [("soap", 5e-3), ("shampoo", 5e-2)])
def test_it_learns_and_goes_on_from_its_saved_state_bit_for_bit(name, rate):
    pytest.importorskip("pytorch_optimizer")
    learns_and_resumes(Optimizer(name=name, learning_rate=rate))


@pytest.mark.parametrize("build", [soap, shampoo])
def test_weights_decay_by_rate_times_decay_and_not_through_the_preconditioner(build):
    pytest.importorskip("pytorch_optimizer")
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = build([{"params": [matrix]}], 0.1, weight_decay=0.5)
    for _ in range(3):
        matrix.grad = torch.full((4, 4), 1e-12)
        before = matrix.detach().clone()
        optimizer.step()
    assert matrix.detach().mean().item() == pytest.approx(0.95 * before.mean().item(), rel=1e-3)
