import pytest
import torch
from tiny_training import learns_and_resumes, steps, tiny_llama

from cpt.optim.build import build_optimizer, muon
from cpt.optim.groups import MATRICES
from cpt.recipe.schema import Optimizer


def test_it_learns_and_goes_on_from_its_saved_state_bit_for_bit():
    learns_and_resumes(Optimizer(name="muon", learning_rate=2e-2))


def test_it_makes_matrices_orthogonal_and_leaves_the_rest_to_adamw():
    trained = tiny_llama()
    optimizer = build_optimizer(Optimizer(name="muon", learning_rate=1e-3, weight_decay=0.0), trained)
    before = {name: parameter.detach().clone() for name, parameter in trained.named_parameters()}
    steps(trained, optimizer, 1)
    update = before["model.layers.0.mlp.up_proj.weight"] - trained.state_dict()["model.layers.0.mlp.up_proj.weight"]
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.3 * values.max()  # Newton-Schulz leaves them between 0.7 and 1.2
    of_adamw = (before["lm_head.weight"] - trained.state_dict()["lm_head.weight"]).abs()
    assert of_adamw.max() == pytest.approx(1e-3, rel=0.05)  # AdamW's first step is the rate, for each number


@pytest.mark.parametrize("shape", [(16, 1024), (64, 64), (1024, 16)])
def test_updates_of_matrices_are_as_large_as_adamws_whatever_their_shape(shape):
    """0.2 of the rate for each number (arXiv 2502.16982, section 2.2)."""
    matrix = torch.nn.Parameter(torch.zeros(shape))
    matrix.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    muon([{"params": [matrix], MATRICES: True}], 1e-3).step()
    assert matrix.detach().square().mean().sqrt().item() == pytest.approx(
        0.2e-3, rel=0.35
    )  # Newton-Schulz leaves singular values near 0.7 to 1.2
