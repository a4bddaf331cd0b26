import pytest
import torch
from tiny import write_recipe
from tiny_models import make_tokenizer, tiny_config
from torch import nn

from cpt.errors import RecipeError
from cpt.models.build import build_model
from cpt.optim.build import build_optimizer, check_rounding
from cpt.optim.groups import parameter_groups
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


def test_a_frozen_parameter_is_left_out():
    model = Tiny()
    model.embedding.requires_grad_(False)
    assert sum(len(group["params"]) for group in parameter_groups(model)) == 4


def test_options_reach_the_optimizer():
    optimizer = build_optimizer(Optimizer(name="adamw", learning_rate=3e-4, betas=[0.8, 0.9], eps=1e-6), Tiny())
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"], optimizer.defaults["eps"]) == (
        3e-4,
        (0.8, 0.9),
        1e-6,
    )


def rates(family: str, **model) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay by the parameter's name."""
    built = build_model(Model(from_scratch=True, config=tiny_config(family), **model), make_tokenizer())
    optimizer = build_optimizer(Optimizer(learning_rate=1e-3, embedding_learning_rate=1e-4, weight_decay=0.1), built)
    of = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    return {name: of[id(p)] for name, p in built.named_parameters() if p.requires_grad}


def test_embeddings_and_head_can_have_a_smaller_learning_rate():
    found = rates("llama")
    assert found["model.embed_tokens.weight"] == (1e-4, 0.0) and found["lm_head.weight"] == (1e-4, 0.1)
    assert found["model.layers.0.mlp.up_proj.weight"] == (1e-3, 0.1) and found["model.norm.weight"] == (1e-3, 0.0)


def test_a_tied_head_is_counted_once():
    found = rates("gpt2")
    assert [name for name, (rate, _) in found.items() if rate == 1e-4] == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
    ]


def test_adapters_have_the_rate_and_the_trained_embeddings_theirs():
    found = rates("llama", lora="cpt")
    ends = {name for name, (rate, _) in found.items() if rate == 1e-4}
    assert {name.split(".")[-4] for name in ends} == {"embed_tokens", "lm_head"}
    assert all("lora_" in name for name in found if name not in ends)


def test_without_the_option_the_groups_are_as_they_were():
    assert [sorted(group) for group in parameter_groups(Tiny())] == [["params"], ["params", "weight_decay"]]


def test_the_schedule_moves_both_rates_together():
    optimizer = build_optimizer(Optimizer(learning_rate=1e-3, embedding_learning_rate=1e-4), Tiny())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert sorted(set(schedule.get_last_lr())) == pytest.approx([5e-5, 5e-4])


def test_a_rate_for_embeddings_that_are_frozen_has_no_effect_and_is_refused():
    with pytest.raises(RecipeError, match="has no effect: neither embeddings nor head are trained"):
        rates("llama", lora={})


def test_a_users_own_optimizer_is_found_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "my_lab_optim.py").write_text(
        "import torch\ndef build(groups, learning_rate, *, rho=0.04):\n    return torch.optim.SGD(groups,"
        " lr=learning_rate * rho)\n"
    )
    monkeypatch.chdir(tmp_path)
    optimizer = build_optimizer(Optimizer(name="my_lab_optim:build", learning_rate=1.0, rho=0.5), Tiny())
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("section", "offloaded", "complaint"),
    [
        (Optimizer(name="adamv"), False, "Did you mean `adamw`"),
        (Optimizer(name="adamw", beta=0.9), False, "`optimizer.beta` is not an option of adamw.*Did you mean `betas`"),
        (Optimizer(name="adamw", embedding_learnin_rate=0.9), False, "Did you mean `embedding_learning_rate`"),
        (Optimizer(name="adamw", embedding_learning_rate=0), False, "must be more than 0"),
        (Optimizer(name="adamw", embedding_learning_rate="low"), False, "expected a number or null"),
        (Optimizer(name="sgd"), True, "cannot keep its states in host memory"),
    ],
)
def test_a_wrong_optimizer_is_a_recipe_error(section, offloaded, complaint):
    with pytest.raises(RecipeError, match=complaint):
        build_optimizer(section, Tiny(), offloaded=offloaded)


@pytest.mark.parametrize(
    ("section", "complaint"),
    [
        (
            Optimizer(name="adamw_8bit"),
            "the states of `adamw_8bit` are for whole parameters, and DeepSpeed's ZeRO cuts them. Take adamw",
        ),
        (Optimizer(name="paged_adamw_8bit"), "DeepSpeed's ZeRO cuts them"),
        (
            Optimizer(name="adamw", rounding="kahan"),
            "`optimizer.rounding`: DeepSpeed keeps an fp32 copy of the weights",
        ),
    ],
)
def test_what_saves_memory_in_its_own_way_is_refused_under_deepspeed(section, complaint):
    with pytest.raises(RecipeError, match=complaint):
        build_optimizer(section, Tiny(), partitioned=True)


def test_deepspeed_gets_torchs_adamw_whatever_the_weights_are():
    assert type(build_optimizer(Optimizer(name="adamw"), Tiny().bfloat16(), partitioned=True)) is torch.optim.AdamW


@pytest.mark.parametrize("decay", [0.0, 1.5])
def test_a_decay_of_rates_is_a_share(decay):
    with pytest.raises(RecipeError, match="layer_decay"):
        build_optimizer(Optimizer(layer_decay=decay), Tiny())


@pytest.mark.parametrize(
    ("name", "dtype", "warns"),
    [("sgd", torch.bfloat16, True), ("sgd", torch.float32, False), ("adamw", torch.bfloat16, False)],
)
def test_bfloat16_weights_without_a_copy_are_warned_of(caplog, name, dtype, warns):
    build_optimizer(Optimizer(name=name), Tiny().to(dtype))
    assert ("keeps no fp32 copy of weights in half precision" in caplog.text) is warns


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["model.dtype=bfloat16"], None),
        ([], "of bfloat16 weights, and this recipe has others: write `model.dtype: bfloat16`"),
        (["model={path: a/b, lora: {}, dtype: bfloat16}", "stage=cpt"], "has no effect: adapters are fp32"),
    ],
)
def test_a_rounding_of_what_is_not_rounded_is_refused(tiny_recipe, tmp_path, overrides, complaint):
    sections = {**tiny_recipe, "optimizer": {"name": "adamw", "rounding": "kahan"}}
    recipe = load_recipe(write_recipe(sections, tmp_path / "r.yaml"), overrides)
    if complaint is None:
        check_rounding(recipe)
        return
    with pytest.raises(RecipeError, match=complaint):
        check_rounding(recipe)
