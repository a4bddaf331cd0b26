import pytest
from tiny import write_recipe
from tiny_search import SPACE, recipe_in

from cpt.errors import RecipeError
from cpt.search.over_space import fitting_space, refuse_mistakes


def test_without_values_on_the_way_nothing_is_pruned_and_that_is_told(tiny_recipe, corpus, tmp_path, capsys):
    held_out = {"perplexity": [{"path": str(corpus / "held_out.jsonl"), "name": "papers"}]}
    _, recipe, _ = recipe_in(tmp_path, tiny_recipe, evaluation=held_out)
    space = write_recipe({**SPACE, "search": {"metric": "eval_papers_loss"}}, tmp_path / "space.yaml")
    assert fitting_space(space, recipe).settings.pruner.name == "none"
    assert "No trial is ended early" in capsys.readouterr().out
    _, often, _ = recipe_in(tmp_path, tiny_recipe, evaluation={**held_out, "every_steps": 2})
    assert fitting_space(space, often).settings.pruner.name == "median"


@pytest.mark.parametrize(("key", "value", "told"), [("sampler", "tpee", "`tpe`"), ("pruner", "medain", "`median`")])
def test_who_draws_and_who_prunes_are_checked_before_anything_starts(tiny_recipe, tmp_path, key, value, told):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    space = write_recipe({**SPACE, "search": {**SPACE["search"], key: value}}, tmp_path / "space.yaml")
    with pytest.raises(RecipeError, match=told):
        refuse_mistakes(fitting_space(space, recipe), recipe, root)


@pytest.mark.slow
def test_a_value_that_only_reality_refuses_is_told_with_its_line(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    wrong = {**SPACE, "optimizer.betas1": [0.8, 0.9], "schedule": [{"name": "cosine"}, {"name": "wsd"}]}
    del wrong["schedule.floor"]
    space = fitting_space(write_recipe(wrong, tmp_path / "space.yaml"), recipe)
    with pytest.raises(RecipeError) as problem:
        refuse_mistakes(space, recipe, root)
    said = str(problem.value)
    assert "with optimizer.betas1 = 0.8: RecipeError: `optimizer.betas1` is not an option of adamw" in said
    assert "with schedule = {name: wsd}: RecipeError: `schedule` needs `decay_tokens`" in said
    assert not (tmp_path / "runs").exists()
