"""Mistakes in recipes and on the command line: refused before training, with the key, the file and the line."""

import sys

import pytest
from promises.conftest import shell

from cpt import load_recipe
from cpt.errors import RecipeError


@pytest.fixture
def refused(recipe, write):
    """What is said of a recipe that is refused."""

    def load(*overrides):
        with pytest.raises(RecipeError) as problem:
            load_recipe(write(recipe), overrides)
        return str(problem.value)

    return load


@pytest.mark.heavy
def test_all_mistakes_come_at_once_with_file_and_line_and_before_torch_is_loaded(recipe, write):
    recipe["data"]["sequence_length"] = "long"
    recipe["training"]["logging_setps"] = 1
    recipe["stge"] = recipe.pop("stage")
    file = write(recipe)
    process = shell(sys.executable, "-X", "importtime", "-m", "cpt", "train", file)
    output = process.communicate(timeout=200)[0]
    lines = file.read_text().splitlines()
    places = {
        number
        for number, line in enumerate(lines, 1)
        if any(word in line for word in ("stge", "long", "setps"))
    }
    assert process.returncode == 2 and len(places) == 3
    assert all(f"{file}:{number}: " in output for number in places)
    imported = {
        line.rsplit("|")[-1].strip()
        for line in output.splitlines()
        if line.startswith("import time:")
    }
    assert "cpt" in imported and not imported & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimiser.learning_rate=1", "optimizer"),
        ("data.sequence_lenght=64", "sequence_length"),
        ("data.sources.0.wieght=1", "weight"),
        ("training.gradient_checkpoint=true", "gradient_checkpointing"),
        ("stage=pretrian", "pretrain"),
    ],
)
def test_an_unknown_key_or_stage_is_refused_with_the_nearest_known_one(refused, override, nearest):
    assert nearest in refused(override).replace(override, "")


@pytest.mark.parametrize(
    "override",
    [
        *(
            "seed=-1",
            "seed=many",
            "seed=010",
            "name=",
            "name=../elsewhere",
            "budget.tokens",
            "budget.tokens=0",
        ),
        *(
            "data.sequence_length=1",
            "data.packing=tight",
            "data.sources=[]",
            "data.sources.7.weight=1",
        ),
        *(
            "optimizer.learning_rate=fast",
            "optimizer.learning_rate=nan",
            "optimizer.learning_rate=3",
        ),
        *("training.bf16=yes please", "training.per_device_train_batch_size=0"),
        *("checkpoints.keep=0", "evaluation.held_out_share=0.9"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_key(refused, override):
    key = override.split("=")[0].split(".")[-1].removesuffix("s")
    expected = {"budget.tokens": "`key.path=value`", "data.sources.7.weight=1": "`7`"}
    said = refused(override).replace(f"`{override}`", "")  # what was typed is quoted
    assert expected.get(override, key) in said


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("name: x\nname: y\n", 2),
        ("name: x\n\tstage: cpt\n", 2),
        ("- a\n", 1),
        ("", 1),
        ("name: [x\nstage: y\n", 2),
    ],
)
def test_a_file_that_is_not_a_recipe_is_refused_with_its_line(tmp_path, text, line):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=rf"recipe\.yaml:{line}\b"):
        load_recipe(tmp_path / "recipe.yaml")


PHASES = "[{until: 512, weights: {domain: 1}}, {until: 256, weights: {general: 1}}, {weights: {domain: 1}}]"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["training.resume_from_checkpoint=x"], "training.resume_from_checkpoint"),
        (["training.ignore_data_skip=true"], "training.ignore_data_skip"),
        (["training.learning_rate=1e-4"], "training.learning_rate"),
        (["training.save_steps=5"], "training.save_steps"),
        (["data.stride=32"], "data.stride"),
        (["rewards=[exact_match]"], "rewards"),
        (["training.bf16=true", "training.fp16=true"], "training.fp16"),
        (["training.deepspeed=profile.json", "training.fsdp=true"], "training.fsdp"),
        (["budget.epochs=1"], "budget.epochs"),
        (["training.gradient_accumulation_steps=2"], "gradient_accumulation_steps"),
        (["model.trust_remote_code=true"], "model.revision"),
        (["data.packing=sliding_window", "data.stride=128"], "data.stride"),
        (
            [f"data.phases={PHASES}", "data.sources.0.weight=1", "data.sources.1.weight=1"],
            "data.phases[1].until",
        ),
    ],
)
def test_settings_without_effect_or_that_contradict_each_other_are_refused(refused, overrides, key):
    said = refused(*overrides)
    for override in overrides:
        said = said.replace(f"`{override}`", "")
    assert key in said


def test_an_impossible_global_batch_is_refused_with_a_possible_one(refused):
    said = refused("budget.global_batch_tokens=300")
    assert "384" in said and "budget.global_batch_tokens" in said.replace(
        "budget.global_batch_tokens=300", ""
    )


@pytest.mark.heavy
def test_check_finds_what_train_refuses_and_starts_nothing(cpt, recipe, write):
    file = write(recipe)
    assert cpt("check", file).returncode == 0
    typed = cpt("check", file, "data.sources.0.path=nowhere.jsonl", "optimizer.beta=1")
    assert typed.returncode == 2 and "nowhere.jsonl" in typed.output and "betas" in typed.output
    assert not (file.parent / "runs").exists()
