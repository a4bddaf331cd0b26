import json

from tiny_search import recipe_in

from cpt.recipe.load import dump_recipe
from cpt.search.gates import FOUND, RECIPES, check_all


def test_each_recipe_goes_through_the_gate_of_reality(tiny_recipe, tmp_path):
    _, right, _ = recipe_in(tmp_path, tiny_recipe)
    _, wrong, _ = recipe_in(tmp_path, {**tiny_recipe, "schedule": {"name": "wsd"}})
    (tmp_path / RECIPES).write_text(json.dumps({"right": dump_recipe(right), "wrong": dump_recipe(wrong)}))
    check_all(tmp_path)
    found = json.loads((tmp_path / FOUND).read_text())
    assert found["right"] == [] and found["wrong"] == ["RecipeError: `schedule` needs `decay_tokens` (wsd)."]
