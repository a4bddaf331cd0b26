"""`cpt pipeline`: runs in a row, each of which starts from one before."""

import json
import signal

import pytest
import typer
from tiny import write_recipe

from cpt.contrib.pipeline.command import command, end, load_pipeline
from cpt.errors import Interrupted, RecipeError
from cpt.recipe.load import REPOSITORY

SHIPPED = sorted((REPOSITORY / "recipes" / "pipelines").glob("*.yaml"))


@pytest.fixture
def pipeline_file(tiny_recipe, tmp_path):
    """`pipeline_file(*steps, **keys)`: by default pre-training and a continuation."""
    write_recipe({**tiny_recipe, "name": "base"}, tmp_path / "base.yaml")
    more = {
        **tiny_recipe,
        "stage": "cpt",
        "name": "more",
        "model": {"path": "elsewhere"},
        "tokenizer": {},
    }
    write_recipe(more, tmp_path / "more.yaml")
    default = (
        {"recipe": "base.yaml"},
        {"recipe": "more.yaml", "model": {"path": str(tmp_path / "runs" / "base")}},
    )

    def write(*steps, **keys):
        return write_recipe(
            {"name": "two", "steps": [*(steps or default)], **keys}, tmp_path / "pipeline.yaml"
        )

    return write


def leave_status(run, **status):
    """What a step's process left."""
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "status.json").write_text(json.dumps(status))


def makers(pipeline):
    """For each step, the numbers of the steps it starts from."""
    return [[other.number for other in pipeline.made_by_others(step)] for step in pipeline.steps]


def test_steps_are_recipes_next_to_the_file_with_keys_on_top(pipeline_file, tmp_path):
    pipeline = load_pipeline(pipeline_file(), ["seed=7"])
    assert [(step.recipe.name, step.recipe.seed) for step in pipeline.steps] == [
        ("base", 7),
        ("more", 7),
    ]
    assert pipeline.steps[1].recipe.model.path == str(tmp_path / "runs" / "base")
    assert makers(pipeline) == [[], [1]]


@pytest.mark.parametrize(
    ("steps", "keys", "named"),
    [
        ([{"recipe": "base.yaml"}], {"stepps": 1}, "pipeline.yaml:.: `stepps` .* `steps`"),
        ([{"model": {}}], {}, "step 1: `recipe`"),
        ([{"recipe": "base.yaml", "sead": 3}], {}, r"step 1 \(.*base.yaml\):\n.*`sead` .*`seed`"),
        ([{"recipe": "base.yaml"}, {"recipe": "base.yaml"}], {}, "steps 1 and 2 .*runs/base"),
        (
            [{"recipe": "base.yaml"}, {"recipe": "base.yaml", "seed": -1, "name": "b"}],
            {},
            r"step 2 .*:\n.*`seed`",
        ),
    ],
)
def test_a_mistake_is_named_with_its_step_and_key(pipeline_file, steps, keys, named):
    with pytest.raises(RecipeError, match=named):
        load_pipeline(pipeline_file(*steps, **keys))


def test_a_step_before_the_one_it_starts_from_is_refused(pipeline_file, tmp_path):
    later = {"recipe": "more.yaml", "model.path": str(tmp_path / "runs" / "base")}
    with pytest.raises(RecipeError, match="step 1 .*runs/base.* step 2"):
        load_pipeline(pipeline_file(later, {"recipe": "base.yaml"}))


def test_a_folder_of_another_recipe_is_refused_with_the_difference(
    pipeline_file, tiny_recipe, tmp_path
):
    run = tmp_path / "runs" / "base"
    run.mkdir(parents=True)
    write_recipe({**tiny_recipe, "name": "base", "seed": 5}, run / "recipe.yaml")
    load_pipeline(pipeline_file())  # it has trained nothing: a start with a mistake, now mended
    (run / "metrics.jsonl").touch()
    with pytest.raises(RecipeError, match="seed: 5 -> 42\n.*`name`"):
        load_pipeline(pipeline_file())
    write_recipe({**tiny_recipe, "name": "base", "description": "old"}, run / "recipe.yaml")
    load_pipeline(pipeline_file())
    slower = {**tiny_recipe, "name": "base", "optimizer": {"learning_rate": 1e-5}}
    write_recipe(slower, run / "recipe.yaml")
    with pytest.raises(RecipeError, match=r"learning_rate.*\n.*cpt train .*base.yaml --change"):
        load_pipeline(pipeline_file())


def test_a_step_starts_from_the_final_model_of_a_finished_one(pipeline_file, tmp_path):
    first = load_pipeline(pipeline_file()).steps[0]
    leave_status(first.run, state="finished")
    final = first.run.folder / "final"
    final.mkdir()
    (final / "config.json").write_text("{}")
    write_recipe(
        first.recipe.model_dump(mode="json", by_alias=True), first.run.folder / "recipe.yaml"
    )
    pipeline = load_pipeline(pipeline_file())
    assert pipeline.steps[0].run.is_finished and pipeline.steps[1].recipe.model.path == str(final)
    assert makers(pipeline) == [[], [1]]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_each_shipped_pipeline_is_a_chain(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = makers(load_pipeline(path))
    assert made == [[], *([number] for number in range(1, len(made)))]


def test_a_mistake_in_a_later_step_and_a_dry_run_start_nothing(
    pipeline_file, tiny_recipe, tmp_path, capsys
):
    bad = {
        **tiny_recipe,
        "name": "bad",
        "data": {**tiny_recipe["data"], "sources": [{"path": "gone.jsonl"}]},
    }
    write_recipe(bad, tmp_path / "bad.yaml")
    with pytest.raises(typer.Exit) as ended:
        command(pipeline_file({"recipe": "base.yaml"}, {"recipe": "bad.yaml"}))
    assert ended.value.exit_code == 2 and "gone.jsonl" in capsys.readouterr().out
    command(pipeline_file(), dry_run=True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"data": {"sources": [{"path": "gone.jsonl"}]}}, "gone.jsonl"),
        ({"training": {"fp16": True, "bf16": True}}, "fp16"),
        ({"model": {"lora": {"target_modules": ["q_prj"]}}}, "q_prj"),
        ({"data": {"sequence_length": 1_000_000}}, "sequence_length"),
    ],
    ids=["data", "training", "lora", "length"],
)
def test_a_mistake_in_a_step_whose_model_is_not_made_yet_starts_nothing(
    pipeline_file, tmp_path, capsys, keys, named
):
    model = {"path": str(tmp_path / "runs" / "base"), **keys.pop("model", {})}
    later = {"recipe": "more.yaml", "model": model, **keys}
    with pytest.raises((typer.Exit, RecipeError)) as ended:
        command(pipeline_file({"recipe": "base.yaml"}, later))
    assert named in f"{capsys.readouterr().out}{ended.value}"
    assert not (tmp_path / "runs").exists()


def test_a_step_that_fails_ends_the_pipeline_with_its_code_and_how_to_continue(
    pipeline_file, capsys
):
    pipeline = load_pipeline(file := pipeline_file())
    step = pipeline.steps[0]
    leave_status(
        step.run, state="failed", message="the loss is no number\nmore of it", step=3, steps=16
    )
    with pytest.raises(typer.Exit) as ended:
        end(pipeline, step, file, 2, 0)
    said = capsys.readouterr().out
    assert (
        ended.value.exit_code == 2
        and "the loss is no number" in said
        and f"cpt pipeline {file}" in said
    )


@pytest.mark.parametrize(("code", "told"), [(75, signal.SIGTERM), (75, 0), (-15, signal.SIGTERM)])
def test_a_step_that_was_told_to_stop_interrupts_the_pipeline(pipeline_file, code, told):
    pipeline = load_pipeline(file := pipeline_file())
    leave_status(pipeline.steps[0].run, state="interrupted", step=3, steps=16)
    with pytest.raises(Interrupted, match="step 1.* step 3"):
        end(pipeline, pipeline.steps[0], file, code, int(told))
