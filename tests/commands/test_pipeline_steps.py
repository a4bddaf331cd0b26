import json

import pytest
from tiny import write_recipe

from cpt.commands.pipeline import load_pipeline
from cpt.errors import RecipeError
from cpt.recipe.load import REPOSITORY


@pytest.fixture
def pipeline_file(tiny_recipe, tmp_path):
    """Pre-training and a continuation, and what else a test wants in the file."""
    write_recipe({**tiny_recipe, "name": "base"}, tmp_path / "base.yaml")
    more = {**tiny_recipe, "stage": "cpt", "name": "more", "model": {"path": "elsewhere"}, "tokenizer": {}}
    write_recipe(more, tmp_path / "more.yaml")

    def write(*steps, **keys):
        steps = steps or (
            {"recipe": "base.yaml"},
            {"recipe": "more.yaml", "model": {"path": str(tmp_path / "runs" / "base")}},
        )
        return write_recipe({"name": "two", "steps": list(steps), **keys}, tmp_path / "pipeline.yaml")

    return write


def test_steps_are_recipes_beside_the_file_with_keys_on_top(pipeline_file, tmp_path):
    pipeline = load_pipeline(pipeline_file(), ["seed=7"])
    assert [(step.number, step.recipe.name, step.recipe.seed) for step in pipeline.steps] == [
        (1, "base", 7),
        (2, "more", 7),
    ]
    assert pipeline.steps[1].recipe.model.path == str(tmp_path / "runs" / "base")
    assert [other.number for other in pipeline.made_by_others(pipeline.steps[1])] == [
        1
    ] and not pipeline.made_by_others(pipeline.steps[0])


@pytest.mark.parametrize(
    ("steps", "keys", "said"),
    [
        ([{"recipe": "base.yaml"}], {"stepps": 1}, "pipeline.yaml:.: `stepps` .* `steps`"),
        ([{"recipe": "base.yaml"}], {"name": None}, "`name`"),
        ([{"recipe": "base.yaml"}], {"steps": []}, "`steps`"),
        ([{"model": {}}], {}, "step 1: `recipe`"),
        ([{"recipe": "gone.yaml"}], {}, r"step 1 \(.*gone.yaml\):\n"),
        ([{"recipe": "base.yaml", "sead": 3}], {}, r"step 1 \(.*base.yaml\):\n.*`sead` .*`seed`"),
        ([{"recipe": "base.yaml"}, {"recipe": "base.yaml"}], {}, "steps 1 and 2 .*runs/base"),
        ([{"recipe": "base.yaml"}, {"recipe": "base.yaml", "seed": -1, "name": "b"}], {}, r"step 2 .*:\n.*`seed`"),
    ],
)
def test_mistakes_are_found_before_anything_starts(pipeline_file, steps, keys, said):
    with pytest.raises(RecipeError, match=said):
        load_pipeline(pipeline_file(*steps, **keys))


def test_a_step_before_the_one_it_goes_on_from_is_refused(pipeline_file, tmp_path):
    later = {"recipe": "more.yaml", "model.path": str(tmp_path / "runs" / "base")}
    with pytest.raises(RecipeError, match="step 1 .*runs/base.* step 2"):
        load_pipeline(pipeline_file(later, {"recipe": "base.yaml"}))


def test_a_step_may_be_judged_by_the_reward_model_of_another(pipeline_file, tmp_path):
    judge = {"name": "reward_model", "path": str(tmp_path / "runs" / "base")}
    rewarded = {"recipe": "more.yaml", "stage": "grpo", "rewards": [judge]}
    pipeline = load_pipeline(pipeline_file({"recipe": "base.yaml"}, rewarded))
    assert [other.number for other in pipeline.made_by_others(pipeline.steps[1])] == [1]


def test_a_folder_of_another_recipe_is_refused_with_what_differs(pipeline_file, tiny_recipe, tmp_path):
    (tmp_path / "runs" / "base").mkdir(parents=True)
    write_recipe({**tiny_recipe, "name": "base", "seed": 5}, tmp_path / "runs" / "base" / "recipe.yaml")
    with pytest.raises(RecipeError, match=r"step 1: .*runs/base .*\n  seed: 5 -> 42"):
        load_pipeline(pipeline_file())


def test_a_finished_step_is_what_the_next_one_starts_from(pipeline_file, tmp_path):
    final = tmp_path / "runs" / "base" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    (final.parent / "status.json").write_text(json.dumps({"state": "finished"}))
    first = load_pipeline(pipeline_file()).steps[0]
    write_recipe(first.recipe.model_dump(mode="json", by_alias=True), final.parent / "recipe.yaml")
    pipeline = load_pipeline(pipeline_file())
    assert pipeline.steps[0].run.is_finished and pipeline.steps[1].recipe.model.path == str(final)
    assert [other.number for other in pipeline.made_by_others(pipeline.steps[1])] == [1]


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "recipes" / "pipelines").glob("*.yaml")), ids=lambda path: path.name
)
def test_each_shipped_pipeline_is_a_chain_and_says_what_it_is_for(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline = load_pipeline(path)
    assert [[other.number for other in pipeline.made_by_others(step)] for step in pipeline.steps] == [
        [step.number - 1] if step.number > 1 else [] for step in pipeline.steps
    ]
    assert path.read_text().startswith("# ") and pipeline.steps[0].recipe.stage == "pretrain"
