"""`key.path=value` on the command line."""

import pytest


def test_a_value_is_read_like_one_in_a_file(load):
    recipe = load(
        "",
        "optimizer.learning_rate=2e-4",
        "budget.tokens=1_000_000",
        "training.bf16=true",
        "tags=[a, b]",
        "description=no",
    )
    assert (recipe.optimizer.learning_rate, recipe.budget.tokens) == (2e-4, 1_000_000)
    assert (recipe.training, recipe.tags, recipe.description) == ({"bf16": True}, ["a", "b"], "no")


@pytest.mark.parametrize("key", ["data.sources.0.weight", "data.sources[0].weight"])
def test_an_entry_of_a_list_is_named_by_its_number(load, key):
    assert load("", f"{key}=3", f"{key}=2").data.sources[0].weight == 2


def test_a_whole_entry_and_a_whole_list_can_be_replaced(load):
    assert load("", "data.sources.0={path: a/b}").data.sources[0].path == "a/b"
    assert [source.path for source in load("", "data.sources=[{path: a/b}, {path: c/d}]").data.sources] == [
        "a/b",
        "c/d",
    ]


def test_a_null_becomes_a_section(load):
    assert load("tokenizer: {path: null}\n", "model={path: a/b, lora: null}", "model.lora.r=4").model.lora == {"r": 4}


def test_a_section_can_be_replaced_by_a_file_and_then_changed(load, here):
    (here / "m.yaml").write_text("path: from/file\ndtype: float16\n")
    model = load("", "model=m.yaml", "model.dtype=float32").model
    assert (model.path, model.dtype) == ("from/file", "float32")


def test_a_base_can_be_put_below_a_section(load, here):
    (here / "m.yaml").write_text("path: from/file\ndtype: float16\n")
    model = load("", "model.base=m.yaml").model
    assert (model.path, model.dtype) == ("some/model", "float16")


def test_an_empty_value_is_null(load):
    assert load("checkpoints: {every_steps: 5}\n", "checkpoints.keep=").checkpoints.keep is None


def test_a_base_below_another_files_keys_would_have_no_effect_and_is_refused(mistakes, here):
    for name in ("one", "two"):
        (here / f"{name}.yaml").write_text(f"path: from/{name}\n")
    (found,) = mistakes("", "model=one.yaml", "model.base=two.yaml")
    assert "`model` stands on a file already, whose keys would stay: write `model=FILE` instead" in found


@pytest.mark.parametrize(
    "override",
    ["modle.path=x", "model.pth=x", "seed", "=3", "data.sources.1.weight=2", "data.sources.x=2", "name.first=2"]
    + ["training.learning_rate=1", "seed=[1", "seed=010", "model=gone.yaml"],
)
def test_a_mistake_quotes_the_override(mistakes, override):
    assert mistakes("", override)[0].startswith(f"on the command line: `{override}`: ")


def test_lora_turns_the_defaults_on(load):
    assert load(lora=True).model.lora == {}


def test_lora_keeps_what_the_recipe_says(load):
    assert load("", "model.lora={r: 4}", lora=True).model.lora == {"r": 4}
