import pytest
from tiny import write_recipe
from tiny_search import SPACE, recipe_in, space_in

from cpt.errors import RecipeError
from cpt.recipe.load import load_with_places
from cpt.recipe.references import REPOSITORY
from cpt.search.figures import refuse_unlogged_metric
from cpt.search.space import load_space, recipe_with, recipes_at_ends


def test_all_mistakes_of_a_file_are_told_with_their_lines(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(
        "search: {metric: loss, trails: 3}\n"
        "optimizer.learning_rate: {low: 2, high: 1}\n"
        "schedule: [{name: cosine}, {name: linear}]\n"
        "schedule.floor: [0.1, 0.2]\n"
        "output_dir: [a, b]\n"
    )
    with pytest.raises(RecipeError) as problem:
        load_space(path)
    lines = str(problem.value).splitlines()
    assert len(lines) == 4
    assert "space.yaml:1: `search.trails`" in lines[0] and "Did you mean `trials`" in lines[0]
    assert "space.yaml:2: `optimizer.learning_rate`" in lines[1]
    assert "space.yaml:4: `schedule.floor` and `schedule` (line 3) are in each other's way" in lines[2]
    assert "space.yaml:5: `output_dir` is set by the search" in lines[3]


@pytest.mark.parametrize("text", ["", "- a\n", "search: {metric: loss}\n", "search: [\n"])
def test_a_file_that_is_no_space_is_refused(tmp_path, text):
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(RecipeError, match="space.yaml:"):
        load_space(tmp_path / "space.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"gone.yaml:1: no such file"):
        load_space(tmp_path / "gone.yaml")


def test_every_end_of_the_space_passes_the_gates_of_shape_and_sense(tiny_recipe, tmp_path):
    *_, root = recipe_in(tmp_path, tiny_recipe)
    found = recipes_at_ends(space_in(tmp_path), root)
    assert len(found) == 5 and {recipe.optimizer.learning_rate for _, recipe in found.values()} == {1e-5, 1e-1, 3e-3}


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("modle.path", ["a", "b"], "`modle` is not a recipe key. Did you mean `model`?"),
        ("budget.token", [1, 2], "`budget.token` is not a key of `budget`"),
        ("optimizer.learning_rate", {"low": -1.0, "high": 1.0}, "must be more than 0"),
        ("data.sources[7].weight", [1, 2], "`data.sources` has 2 entries, counted from 0: there is no `7`"),
        ("data.packing", ["none", "best"], "expected one of best_fit"),
        ("training.max_grad_norm", ["much", 1.0], "expected a number"),
    ],
)
def test_a_value_that_the_recipe_cannot_have_is_told_with_the_spaces_line(tiny_recipe, tmp_path, key, value, told):
    *_, root = recipe_in(tmp_path, tiny_recipe)
    space = load_space(write_recipe({"search": SPACE["search"], key: value}, tmp_path / "space.yaml"))
    with pytest.raises(RecipeError, match=r"space.yaml:\d+: with ") as problem:
        recipes_at_ends(space, root)
    assert told in str(problem.value)


def test_values_are_put_on_top_without_touching_the_recipe(tiny_recipe, tmp_path):
    _, recipe, root = recipe_in(tmp_path, tiny_recipe)
    values = {
        "data.sources[1].weight": 0.9,
        "schedule": {"name": "wsd", "decay_tokens": 512},
        "checkpoints.every_steps": 2,
    }
    changed = recipe_with(root, values, root.place)
    assert changed.data.sources[1].weight == 0.9 and changed.schedule.options == {"decay_tokens": 512}
    assert recipe_with(root, {}, root.place) == recipe


def test_a_grid_has_all_values_of_each_key(tmp_path):
    assert space_in(tmp_path).grid() is None
    counted = {
        "search": SPACE["search"],
        "schedule.floor": [0.0, 0.1],
        "optimizer.weight_decay": {"low": 0.0, "high": 0.2, "step": 0.1},
    }
    grid = load_space(write_recipe(counted, tmp_path / "space.yaml")).grid()
    assert grid == {"schedule.floor": ["0.0", "0.1"], "optimizer.weight_decay": pytest.approx([0.0, 0.1, 0.2])}


def test_a_grid_ends_where_it_is_used_up(tmp_path):
    grid = {
        "search": {"metric": "loss", "sampler": "grid", "trials": 50},
        "seed": [1, 2],
        "schedule.floor": [0.0, 0.1],
    }
    assert load_space(write_recipe(grid, tmp_path / "grid.yaml")).num_trials == 4
    assert space_in(tmp_path).num_trials == 6


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "recipes" / "search").glob("*.yaml")), ids=lambda path: path.name
)
def test_a_shipped_space_fits_the_recipe_that_its_first_lines_name(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    command = (
        path.read_text()
        .partition("cpt search ")[2]
        .partition("#   cpt")[0]
        .partition("search:")[0]
        .replace("\\\n#", "")
    )
    recipe, *words = command.split()
    overrides = [word for word in words if "=" in word]
    assert words[:2] == ["--space", str(path.relative_to(REPOSITORY))] and overrides
    loaded, root = load_with_places(recipe, overrides)
    space = load_space(path)
    refuse_unlogged_metric(space, loaded)
    assert recipes_at_ends(space, root)
