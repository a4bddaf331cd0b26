import pytest
from torch import nn

from cpt.errors import RecipeError
from cpt.optim.build import build_optimizer, parameter_groups
from cpt.recipe.schema import Optimizer


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)


def test_embeddings_norms_and_biases_have_no_weight_decay():
    model = Tiny()
    optimizer = build_optimizer(Optimizer(name="adamw", learning_rate=1e-3, weight_decay=0.3), model)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = {name: decays[id(p)] for name, p in model.named_parameters()}
    assert named == {"embedding.weight": 0, "linear.weight": 0.3, "linear.bias": 0, "norm.weight": 0, "norm.bias": 0}


def test_a_frozen_parameter_is_left_out():
    model = Tiny()
    model.embedding.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model)) == 4


def test_options_reach_the_optimizer():
    optimizer = build_optimizer(Optimizer(name="adamw", learning_rate=3e-4, betas=[0.8, 0.9], eps=1e-6), Tiny())
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"], optimizer.defaults["eps"]) == (3e-4, (0.8, 0.9), 1e-6)


def test_a_users_own_optimizer_is_found_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_lab_optim.py").write_text(
        "import torch\ndef build(groups, learning_rate, *, rho=0.04):\n    return torch.optim.SGD(groups, lr=learning_rate * rho)\n"
    )
    monkeypatch.chdir(tmp_path)
    optimizer = build_optimizer(Optimizer(name="my_lab_optim:build", learning_rate=1.0, rho=0.5), Tiny())
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("section", "offloaded", "complaint"),
    [
        (Optimizer(name="adamv"), False, "Did you mean `adamw`"),
        (Optimizer(name="adamw", beta=0.9), False, "`optimizer.beta` is not an option of adamw.*Did you mean `betas`"),
        (Optimizer(name="sgd"), True, "cannot keep its states in host memory"),
    ],
)
def test_a_wrong_optimizer_is_a_recipe_error(section, offloaded, complaint):
    with pytest.raises(RecipeError, match=complaint):
        build_optimizer(section, Tiny(), offloaded=offloaded)
