import pytest
import torch
from tiny import write_recipe

from cpt.errors import RecipeError
from cpt.optim.rounding import chance, check_rounding, nearest, split, stochastic
from cpt.recipe.load import load_recipe


def test_the_mean_of_many_stochastic_roundings_is_the_number_itself():
    between = torch.full((100_000,), 1.0 + 2**-7 * 0.3)  # bfloat16 knows 1 and 1 + 2**-7
    found = stochastic(between, chance(0, 0, between.device))
    assert set(found.tolist()) == {1.0, 1.0 + 2**-7}
    assert found.float().mean().item() == pytest.approx(1 + 2**-7 * 0.3, abs=2**-7 * 0.01)
    assert nearest(between).unique().tolist() == [1.0]


def test_what_a_bfloat16_can_hold_is_left_alone_negative_and_infinite_numbers_too():
    exact = torch.tensor([0.0, -1.5, 3e38, float("inf"), -float("inf"), 1e-40]).bfloat16()
    assert torch.equal(stochastic(exact.float(), chance(3, 1, exact.device)), exact)
    negative = stochastic(torch.full((1000,), -1.0 - 2**-9), chance(3, 1, exact.device)).float()
    assert set(negative.tolist()) == {-1.0, -1.0 - 2**-7}


def test_the_same_draw_is_the_same_and_every_other_is_another():
    weight = torch.linspace(0.1, 0.2, 4096)

    def drawn(number, draw):
        return stochastic(weight, chance(number, draw, weight.device))

    assert torch.equal(drawn(1, 5), drawn(1, 5))
    assert not torch.equal(drawn(1, 5), drawn(1, 6)) and not torch.equal(drawn(1, 5), drawn(2, 5))


def test_what_rounding_takes_is_kept_to_16_bits():
    weight = torch.linspace(0.01, 0.04, 4096)
    rounded, rest = split(weight)
    assert (rounded.dtype, rest.dtype) == (torch.bfloat16, torch.bfloat16)
    assert ((rounded.float() + rest.float() - weight).abs() <= weight * 2**-16).all()


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
