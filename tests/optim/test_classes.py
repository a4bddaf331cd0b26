import pytest
from tiny_training import learns_and_resumes, tiny_llama

from cpt.errors import RecipeError
from cpt.optim.build import build_optimizer, check_optimizer
from cpt.recipe.schema import Optimizer


def test_a_class_of_torch_learns_and_resumes():
    learns_and_resumes(Optimizer(name="torch.optim:NAdam", learning_rate=5e-3))


def test_options_are_the_classs_own_arguments():
    built = build_optimizer(Optimizer(name="torch.optim:NAdam", learning_rate=1e-3, betas=[0.8, 0.9]), tiny_llama())
    assert built.defaults["betas"] == (0.8, 0.9) and built.defaults["lr"] == 1e-3
    with pytest.raises(RecipeError, match="`optimizer.momentum_decoy`"):
        check_optimizer(Optimizer(name="torch.optim:NAdam", momentum_decoy=0.1))
