import pytest
import torch
from tiny_training import learns_and_resumes, tiny_llama

from cpt.errors import RecipeError
from cpt.optim.build import build_optimizer, check_optimizer
from cpt.optim.classes import as_function
from cpt.recipe.schema import Optimizer


def test_a_class_of_torch_learns_and_resumes():
    learns_and_resumes(Optimizer(name="torch.optim:NAdam", learning_rate=5e-3))


def test_so_does_one_of_another_library():
    pytest.importorskip("pytorch_optimizer")
    learns_and_resumes(Optimizer(name="pytorch_optimizer:Lion", learning_rate=1e-3))


def test_options_are_the_classs_own_arguments():
    built = build_optimizer(Optimizer(name="torch.optim:NAdam", learning_rate=1e-3, betas=[0.8, 0.9]), tiny_llama())
    assert built.defaults["betas"] == (0.8, 0.9) and built.defaults["lr"] == 1e-3
    with pytest.raises(RecipeError, match="momentum_decoy.*Did you mean `momentum_decay`"):
        check_optimizer(Optimizer(name="torch.optim:NAdam", momentum_decoy=0.1))


def test_a_function_stays_as_it_is():
    assert as_function(torch.nn.functional.relu) is torch.nn.functional.relu
