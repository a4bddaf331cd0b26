import sys

import pytest
from tiny_training import learns_and_resumes, tiny_llama

from cpt.errors import RecipeError, ResourceError
from cpt.optim.build import build_optimizer
from cpt.optim.preconditioned import by_name
from cpt.recipe.schema import Optimizer


@pytest.mark.parametrize(("name", "rate"), [("soap", 5e-3), ("shampoo", 5e-2)])
def test_it_learns_and_goes_on_from_its_saved_state_bit_for_bit(name, rate):
    pytest.importorskip("pytorch_optimizer")
    learns_and_resumes(Optimizer(name=name, learning_rate=rate))


@pytest.mark.parametrize("name", ["muon", "soap", "shampoo"])
def test_what_needs_whole_matrices_is_refused_under_zero(name):
    with pytest.raises(RecipeError, match="needs whole matrices"):
        build_optimizer(Optimizer(name=name, learning_rate=1e-3), tiny_llama(), partitioned=True)


def test_without_the_library_its_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(ResourceError, match=r"pip install 'cpt\[optimizers\]'"):
        by_name("SOAP")
