"""The file of a search: what it may hold, and what is refused with its line."""

import pytest
import yaml
from tiny import write_recipe

from cpt.contrib.search.command import refuse_unlogged_metric
from cpt.contrib.search.space import load_space, open_study, recipes_at_ends
from cpt.errors import RecipeError
from cpt.recipe.load import REPOSITORY, load_recipe

LOSS = {"metric": "loss"}
RATE = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}}


def space_of(folder, axes=RATE, **settings):
    path = folder / "space.yaml"
    path.write_text(yaml.safe_dump({"search": LOSS | settings, **axes}, sort_keys=False))
    return load_space(path)


def test_all_mistakes_come_at_once_with_their_lines(tmp_path):
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
    lines = [line.partition("space.yaml:")[2] for line in str(problem.value).splitlines()]
    assert [line[0] for line in lines] == ["1", "2", "4", "5"] and "`trials`" in lines[0]


def test_numbers_are_integers_if_the_recipe_says_so_or_all_of_them_are(tmp_path):
    ranges = {
        "budget.global_batch_tokens": {"low": 1e3, "high": 1e6},
        "optimizer.learning_rate": {"low": 0, "high": 1},
        "schedule.warmup_tokens": {"low": 100, "high": 200},
        "schedule.floor": {"low": 0, "high": 0.5},
    }
    kinds = [type(axis.distribution).__name__ for axis in space_of(tmp_path, ranges).axes]
    assert kinds == ["IntDistribution", "FloatDistribution", "IntDistribution", "FloatDistribution"]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.learning_rate", {"low": 0, "high": 1, "log": True}),
        ("optimizer.learning_rate", {"low": 1e-6}),
        ("optimizer.learning_rate", {"low": 1e-6, "high": "much"}),
        ("optimizer.learning_rate", 1e-5),
        ("budget.global_batch_tokens", {"low": 512, "high": 1024, "step": 512, "log": True}),
        ("modle.path", ["a", "b"]),
        ("optimizer.learning_rate", {"low": -1.0, "high": 1.0}),
        ("data.sources[7].weight", [1, 2]),
        ("data.packing", ["none", "best"]),
    ],
)
def test_what_the_recipe_or_optuna_cannot_have_is_refused_with_the_spaces_line(
    tiny_recipe, tmp_path, key, value
):
    recipe = write_recipe(tiny_recipe, tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match=r"space.yaml:\d+: "):
        recipes_at_ends(space_of(tmp_path, {key: value}), recipe)


def test_a_grid_needs_lists(tmp_path):
    with pytest.raises(RecipeError, match=r"space.yaml:\d+: `optimizer.learning_rate`"):
        space_of(tmp_path, sampler="grid")


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": "tpee"},
        {"sampler": {"name": "tpe", "startup": 4}},
        {"pruner": {"name": "median", "n_startup_trials": -1}},
        {"pruner": "no_such:thing"},
    ],
)
def test_a_sampler_or_pruner_that_optuna_refuses_is_named(tmp_path, settings):
    with pytest.raises(RecipeError, match=rf"space.yaml:\d+: `search.{next(iter(settings))}`"):
        open_study("sqlite://", "search", space_of(tmp_path, **settings))


@pytest.mark.parametrize(
    ("metric", "evaluation"),
    [("los", {}), ("eval_domain_loss", {}), ("eval_dmain_loss", {"held_out_share": 0.1})],
)
def test_a_metric_that_no_run_logs_is_refused(tiny_recipe, tmp_path, metric, evaluation):
    recipe = load_recipe(
        write_recipe(tiny_recipe | {"evaluation": evaluation}, tmp_path / "recipe.yaml")
    )
    with pytest.raises(RecipeError, match=r"space.yaml:1: `search.metric`"):
        refuse_unlogged_metric(space_of(tmp_path, metric=metric), recipe)
    refuse_unlogged_metric(space_of(tmp_path, metric="loss"), recipe)


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "recipes" / "search").glob("*.yaml")), ids=lambda path: path.name
)
def test_a_shipped_space_fits_the_recipe_in_its_first_lines(path, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    command = (
        path.read_text().partition("cpt search ")[2].partition("#   cpt")[0].partition("search:")[0]
    )
    recipe, *words = command.replace("\\\n#", "").split()
    overrides = [word for word in words if "=" in word]
    space = load_space(path)
    refuse_unlogged_metric(space, load_recipe(recipe, overrides))
    assert words[:2] == ["--space", str(path.relative_to(REPOSITORY))] and recipes_at_ends(
        space, recipe, overrides
    )
