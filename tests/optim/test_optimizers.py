from contextlib import nullcontext

import pytest
import torch
from tiny import write_recipe
from tiny_models import make_tokenizer, tiny_config
from tiny_training import learns_and_resumes, tiny_llama
from torch import nn

from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.optim.build import build_optimizer, check_optimizer, check_rounding
from cpt.optim.groups import IS_EMBEDDING
from cpt.recipe.load import load_recipe
from cpt.recipe.schema import Model, Optimizer


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


def rates(family: str, **model) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay by the parameter's name."""
    built = build_model(Model(from_scratch=True, config=tiny_config(family), **model), make_tokenizer())
    optimizer = build_optimizer(Optimizer(learning_rate=1e-3, embedding_learning_rate=1e-4, weight_decay=0.1), built)
    of = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in built.named_parameters() if p.requires_grad}


def test_adapters_have_the_rate_and_the_trained_embeddings_theirs():
    found = rates("llama", lora="cpt")
    ends = {name for name, (rate, _) in found.items() if rate == 1e-4}
    assert {name.split(".")[-4] for name in ends} == {"embed_tokens", "lm_head"}
    assert all("lora_" in name for name in found if name not in ends)


def test_a_rate_for_embeddings_that_are_frozen_has_no_effect_and_is_refused():
    with pytest.raises(RecipeError, match="`optimizer.embedding_learning_rate`"):
        rates("llama", lora={})


@pytest.mark.parametrize(
    ("section", "engine", "key"),
    [
        (Optimizer(name="adamv"), {}, "adamv"),
        (Optimizer(name="adamw", beta=0.9), {}, "`optimizer.beta`"),
        (Optimizer(name="adamw", embedding_learning_rate=0), {}, "`optimizer.embedding_learning_rate`"),
        (Optimizer(name="adamw_8bit", rounding="up"), {}, "`optimizer.rounding`"),
        (Optimizer(name="sgd"), {"offloaded": True}, "`optimizer.name`"),
        (Optimizer(name="adamw_8bit"), {"partitioned": True}, "`optimizer.name`"),
        (Optimizer(name="muon"), {"partitioned": True}, "`optimizer.name`"),
        (Optimizer(name="adamw", rounding="kahan"), {"partitioned": True}, "`optimizer.rounding`"),
    ],
)
def test_a_wrong_optimizer_is_a_recipe_error(section, engine, key):
    with pytest.raises(RecipeError, match=key):
        build_optimizer(section, Tiny(), **engine)


@pytest.mark.parametrize("options", [{}, {"rounding": None}])
def test_deepspeed_gets_torchs_adamw_whatever_the_weights_are(options):
    section = Optimizer(name="adamw", **options)
    assert type(build_optimizer(section, Tiny().bfloat16(), partitioned=True)) is torch.optim.AdamW


@pytest.mark.parametrize(
    ("name", "dtype", "warns"),
    [("sgd", torch.bfloat16, True), ("sgd", torch.float32, False), ("adamw", torch.bfloat16, False)],
)
def test_bfloat16_weights_without_a_copy_are_warned_of(caplog, name, dtype, warns):
    build_optimizer(Optimizer(name=name), Tiny().to(dtype))
    assert ("keeps no fp32 copy of weights in half precision" in caplog.text) is warns


@pytest.mark.parametrize(
    ("overrides", "is_rounded"),
    [
        (["model.dtype=bfloat16"], True),
        ([], False),
        (["model={path: a/b, lora: {}, dtype: bfloat16}", "stage=cpt"], False),
    ],
)
def test_a_rounding_of_what_is_not_rounded_is_refused(tiny_recipe, tmp_path, overrides, is_rounded):
    sections = {**tiny_recipe, "optimizer": {"name": "adamw", "rounding": "kahan"}}
    recipe = load_recipe(write_recipe(sections, tmp_path / "r.yaml"), overrides)
    with nullcontext() if is_rounded else pytest.raises(RecipeError, match="`optimizer.rounding`"):
        check_rounding(recipe)


@pytest.mark.parametrize(("name", "paged"), [("adamw_8bit", False), ("paged_adamw_8bit", True)])
def test_8_bit_is_built_by_name_with_embeddings_apart(name, paged):
    model = Tiny().bfloat16()
    optimizer = build_optimizer(Optimizer(name=name, learning_rate=1e-3, betas=[0.8, 0.9], weight_decay=0.2), model)
    assert (optimizer.eight_bit, optimizer.paged, optimizer.rounding) == (True, paged, "stochastic")
    assert optimizer.defaults == {"lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.2}
    apart = {
        id(parameter): group.get(IS_EMBEDDING, False)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert apart == {id(parameter): parameter is model.embedding.weight for parameter in model.parameters()}


def test_a_class_of_torch_learns_and_resumes():
    learns_and_resumes(Optimizer(name="torch.optim:NAdam", learning_rate=5e-3))


def test_options_are_the_classs_own_arguments():
    built = build_optimizer(Optimizer(name="torch.optim:NAdam", learning_rate=1e-3, betas=[0.8, 0.9]), tiny_llama())
    assert built.defaults["betas"] == (0.8, 0.9) and built.defaults["lr"] == 1e-3
    with pytest.raises(RecipeError, match="`optimizer.momentum_decoy`"):
        check_optimizer(Optimizer(name="torch.optim:NAdam", momentum_decoy=0.1))
