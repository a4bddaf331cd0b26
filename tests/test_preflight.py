"""Each thing of the world that a recipe can be wrong about, planted one at a time, then all at once."""

import json

import pytest
import torch
from tiny import TINY_LLAMA, write_recipe

from cpt import preflight
from cpt.errors import CptError, RecipeError, ResourceError
from cpt.recipe.load import load_with_places
from cpt.recipe.schema import Recipe

MICRO_BATCH = {"per_device_train_batch_size": 2}


@pytest.fixture
def load(tiny_recipe, tmp_path):
    """Load the tiny recipe with sections changed: `load(model={...})`."""

    def with_changes(**sections) -> Recipe:
        path = write_recipe({**tiny_recipe, **sections}, tmp_path / "recipe.yaml")
        return load_with_places(path)[0]

    return with_changes


def mistakes(recipe: Recipe) -> list[str]:
    return [f"{type(mistake).__name__}: {mistake}" for mistake in preflight.check_reality(recipe).mistakes]


def test_a_sound_recipe_has_no_mistakes(load):
    found = preflight.check_reality(load())
    assert found.mistakes == found.unchecked == []


@pytest.mark.parametrize(
    ("sections", "complaint"),
    [
        ({"optimizer": {"name": "adamv"}}, "no optimizer called `adamv`. Did you mean `adamw`?"),
        ({"optimizer": {"name": "adamw", "momentum": 0.9}}, "`optimizer.momentum` is not an option of adamw"),
        ({"optimizer": {"name": "adamw", "betas": [0.9, 1.5]}}, "adamw refuses its options: Invalid beta parameter"),
        ({"schedule": {"name": "cosinus"}}, "no schedule called `cosinus`. Did you mean `cosine`?"),
        ({"schedule": {"name": "cosine", "warmup_tokens": 10**9}}, "`schedule.warmup_tokens` is 1,000,000,000"),
        ({"schedule": {"name": "cosine", "warmup_tokens": "many"}}, "`schedule.warmup_tokens`: expected a number"),
        ({"stage": "my_lab.nowhere"}, "cannot import `my_lab.nowhere`"),
        ({"monitoring": {"trackers": ["wandbb"]}}, "no tracker called `wandbb`. Did you mean `wandb`?"),
        ({"monitoring": {"trackers": ["swanlab"]}}, "ResourceError: `monitoring.trackers[0]`: swanlab is not installed"),
        ({"model": {"from_scratch": True, "config": {**TINY_LLAMA, "model_type": "lama"}}}, "Did you mean `llama`?"),
        ({"model": {"from_scratch": True, "config": {**TINY_LLAMA, "vocab_size": 300}}}, "has 320 tokens, the model's vocabulary 300"),
        ({"model": {"from_scratch": True, "config": TINY_LLAMA, "attention": "sdqa"}}, "no implementation called `sdqa`"),
        ({"model": {"path": "./nowhere"}}, "./nowhere does not exist"),
        ({"output_dir": "/proc/runs"}, "`output_dir`: cannot write to /proc"),
        ({"training": {**MICRO_BATCH, "deepspeed": {"zero_optimization": {"stage": 2}}}}, "`gradient_clipping` is missing"),
    ],
)  # fmt: skip
def test_one_thing_wrong_is_one_complaint_with_its_remedy(load, sections, complaint):
    found = mistakes(load(**sections))
    assert any(complaint in line for line in found), found


def test_missing_files_are_data_errors(load, tiny_recipe):
    found = mistakes(load(data={**tiny_recipe["data"], "sources": [{"path": "nowhere/*.jsonl"}]}))
    assert any(line.startswith("DataError") and "nowhere/*.jsonl" in line for line in found), found


def test_packing_is_refused_where_documents_would_leak(load, tiny_recipe):
    shape = {
        "model_type": "mamba2",
        "vocab_size": 320,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
    }
    model = {"from_scratch": True, "config": shape, "attention": "eager"}
    assert any("`data.packing`: mamba2" in line and "`packing: none`" in line for line in mistakes(load(model=model)))
    assert mistakes(load(model=model, data={**tiny_recipe["data"], "packing": "none"})) == []


def test_rows_longer_than_the_learned_positions_are_refused(load):
    shape = {"model_type": "gpt2", "vocab_size": 320, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}
    assert any(
        "`data.sequence_length` is 64, but the model has learned 32 positions" in m
        for m in mistakes(load(model={"from_scratch": True, "config": shape}))
    )


def test_a_model_that_does_not_fit_the_disk_is_refused_by_an_estimate(load):
    shape = {**TINY_LLAMA, "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 900, "num_attention_heads": 128}
    found = mistakes(load(model={"from_scratch": True, "config": shape}))
    assert any(line.startswith("ResourceError: `output_dir`") and "(an estimate)" in line for line in found), found
    elsewhere = preflight.check_reality(load(model={"from_scratch": True, "config": shape}, training={**MICRO_BATCH, "bf16": True}))
    if not torch.accelerator.is_available():
        assert elsewhere.mistakes == [] and "for another one" in elsewhere.unchecked[0]


def test_the_hub_is_unchecked_when_it_cannot_be_asked(load, tokenizer_folder):
    found = preflight.check_reality(load(stage="cpt", model={"path": "Qwen/Qwen3-0.6B"}, tokenizer={"path": "Qwen/Qwen3-0.6B"}))
    assert found.mistakes == []
    assert found.unchecked == ["`model.path`: Qwen/Qwen3-0.6B (Hub)", "`tokenizer.path`: Qwen/Qwen3-0.6B (Hub)"]


def test_a_hub_model_is_judged_by_the_shape_in_the_recipe(load):
    model = {"path": "some/model", "config": {**TINY_LLAMA, "vocab_size": 300}}
    assert any("has 320 tokens, the model's vocabulary 300" in line for line in mistakes(load(stage="cpt", model=model)))


def test_a_missing_compiler_is_a_resource_error_with_the_install_line(load, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    profile = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
    }
    found = mistakes(load(training={"per_device_train_batch_size": 2, "deepspeed": profile}))
    assert any(line.startswith("ResourceError") and "g++" in line and "apt-get install g++" in line for line in found), found


def test_all_mistakes_come_in_one_error_with_their_lines(tiny_recipe, tmp_path):
    sections = {**tiny_recipe, "optimizer": {"name": "adamv"}, "schedule": {"name": "cosinus"}, "output_dir": "/proc/runs"}
    path = write_recipe(sections, tmp_path / "recipe.yaml")
    recipe, root = load_with_places(path)
    with pytest.raises(RecipeError) as error:
        preflight.refuse_mistakes(recipe, root=root)
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    written = path.read_text().splitlines()
    for line, key in zip(lines, ("optimizer", "schedule", "output_dir"), strict=True):
        number = int(line.removeprefix(f"{path}:").split(":")[0])
        assert f"`{key}" in line and written[number - 1].split(":")[0].strip() in (key, "name")


def test_a_single_mistake_keeps_the_class_of_its_remedy(load):
    with pytest.raises(ResourceError, match="pip install swanlab"):
        preflight.refuse_mistakes(load(monitoring={"trackers": ["swanlab"]}))


def test_nothing_is_left_behind_by_the_check(load, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    recipe = load()
    preflight.refuse_mistakes(recipe)
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before] == [tmp_path / "recipe.yaml"]


def test_report_prints_and_gives_the_exit_code(load, tmp_path, capsys):
    assert preflight.report(tmp_path / "recipe.yaml", load()) == 0
    assert preflight.report(tmp_path / "recipe.yaml", load(optimizer={"name": "adamv"})) == 2
    assert preflight.report(tmp_path / "recipe.yaml", load(stage="cpt", model={"path": "a/b"}, tokenizer={"path": "a/b"})) == 0
    printed = capsys.readouterr().out
    assert "recipe.yaml: no mistakes." in printed
    assert "RecipeError: " in printed and "recipe.yaml: 1 mistake(s)." in printed
    assert "2 things unchecked: `model.path`: a/b (Hub)" in printed


def test_accelerates_profile_is_checked_too(load):
    with pytest.raises(CptError, match="zero_optimization"):
        preflight.refuse_mistakes(load(), deepspeed=json.loads('{"gradient_clipping": 3}'))
