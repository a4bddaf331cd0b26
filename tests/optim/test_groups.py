"""Which parameters decay, and matrices apart from the rest."""

import pytest
from tiny_models import make_tokenizer, tiny_config

from cpt.models.build import build_model
from cpt.optim.groups import MATRICES, parameter_groups
from cpt.recipe.schema import Model


@pytest.fixture(scope="module")
def llama():
    return build_model(Model(from_scratch=True, config=tiny_config("llama")), make_tokenizer())


def of_each(model, key, groups):
    values = {id(parameter): group.get(key) for group in groups for parameter in group["params"]}
    return {name: values[id(parameter)] for name, parameter in model.named_parameters()}


def test_matrices_of_layers_are_told_from_embeddings_head_and_norms(llama):
    found = of_each(llama, MATRICES, parameter_groups(llama, matrices_apart=True))
    matrices = {name for name, is_matrix in found.items() if is_matrix}
    assert matrices == {name for name in found if name.endswith("_proj.weight")}


def test_matrices_of_layers_and_head_decay_and_embeddings_and_norms_do_not(llama):
    found = of_each(llama, "weight_decay", parameter_groups(llama))
    decays = {name for name, decay in found.items() if decay is None}
    assert set(found.values()) == {None, 0.0}
    assert decays == {name for name, _ in llama.named_parameters() if name.endswith("_proj.weight")} | {
        "lm_head.weight"
    }
