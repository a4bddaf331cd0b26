"""Sections in files of their own: found, merged, and mistakes shown in the file at fault."""

from pathlib import Path

import pytest

from cpt.recipe.load import dump_recipe, load_recipe

MODEL = "path: base/model\ndtype: bfloat16\nconfig:\n  model_type: llama\n  hidden_size: 64\n"


@pytest.fixture(autouse=True)
def model_file(here: Path):
    (here / "models").mkdir()
    (here / "models/m.yaml").write_text(MODEL)


def with_model(text: str) -> str:
    return f"name: r\nmodel: {text}\ndata: {{sources: [{{path: some/texts}}]}}\nbudget: {{tokens: 10}}\n"


def test_a_section_may_be_a_path(load):
    assert load(only=with_model("models/m.yaml")).model.dtype == "bfloat16"


def test_a_section_may_build_on_a_file(load):
    model = load(only=with_model("{base: models/m.yaml, path: other/model, config: {hidden_size: 128}}")).model
    assert (model.path, model.dtype, model.config) == (
        "other/model",
        "bfloat16",
        {"model_type": "llama", "hidden_size": 128},
    )


def test_bases_may_have_bases(load, here):
    (here / "models/big.yml").write_text("base: m.yaml\nconfig: {hidden_size: 4096}\n")
    assert load(only=with_model("models/big.yml")).model.config == {"model_type": "llama", "hidden_size": 4096}


def test_a_whole_recipe_may_build_on_another(load, here):
    (here / "base.yaml").write_text(with_model("models/m.yaml") + "tags: [a, b]\n")
    recipe = load(only="base: base.yaml\nname: new\nbudget: {tokens: 20}\ntags: [c]\n")
    assert (recipe.name, recipe.budget.tokens, recipe.tags, recipe.model.path) == ("new", 20, ["c"], "base/model")


def test_phases_take_the_place_of_a_bases_weights(load, here):
    sources = "sources: [{name: a, path: x/a, weight: 3}, {name: b, path: x/b}]"
    (here / "mixture.yaml").write_text(sources)
    data = "{base: mixture.yaml, phases: [{weights: {a: 1, b: 1}}]}"
    recipe = load(only=f"name: r\nmodel: models/m.yaml\nbudget: {{tokens: 10}}\ndata: {data}\n")
    assert recipe.data.phases[0].weights == {"a": 1, "b": 1}


def test_a_section_that_names_its_file_takes_nothing_from_an_outer_base(load, here):
    (here / "base.yaml").write_text(with_model("{path: old/model, config: {model_type: qwen2, vocab_size: 3}}"))
    for model in ("models/m.yaml", "{base: models/m.yaml}"):
        assert load(only=f"base: base.yaml\nmodel: {model}\n").model.config == {
            "model_type": "llama",
            "hidden_size": 64,
        }


def test_every_kind_of_section_may_be_a_file(load, here):
    for name, text in {
        "mixture": "sources: [{base: source.yaml, weight: 2}]\nfilters: [filter.yaml]\n",
        "source": "path: some/texts\ntext_column: body\n",
        "filter": "name: length\nmin_characters: 5\n",
        "budget": "tokens: 10\n",
        "training": "bf16: true\n",
        "lora": "r: 4\n",
    }.items():
        (here / f"{name}.yaml").write_text(text)
    recipe = load(
        only="name: r\nmodel: {path: a/b, lora: lora.yaml}\ndata: {base: mixture.yaml, sequence_length: 64}\n"
        "budget: budget.yaml\ntraining: {base: training.yaml, logging_steps: 3}\n"
    )
    assert recipe.data.sources[0].text_column == "body" and recipe.data.sources[0].weight == 2
    assert recipe.data.filters[0].options == {"min_characters": 5}
    assert recipe.training == {"bf16": True, "logging_steps": 3} and recipe.model.lora == {"r": 4}


def test_paths_start_from_the_file_that_names_them(load, here):
    (here / "mine/models").mkdir(parents=True)
    (here / "mine/models/m.yaml").write_text("path: mine/model\n")
    (here / "mine/r.yaml").write_text(with_model("models/m.yaml"))
    assert load_recipe("mine/r.yaml").model.path == "mine/model"
    (here / "mine/models/m.yaml").unlink()
    assert load_recipe("mine/r.yaml").model.path == "base/model"  # the current folder comes next


def test_the_recipes_of_the_repository_come_last(load):
    assert load(only=with_model("models/gpt2/124m.yaml")).model.path == "openai-community/gpt2"


def test_a_mistake_is_shown_in_the_file_at_fault(mistakes, here):
    (here / "models/m.yaml").write_text("path: a/b\n\ndtyp: bfloat16\nfrom_scratch: no\n")
    assert mistakes(only=with_model("\n  base: models/m.yaml\n  attention: 3")) == [
        "models/m.yaml:3: `model.dtyp` is not a key of `model`. Did you mean `dtype`?",
        'models/m.yaml:4: `model.from_scratch`: expected true or false, got the text "no": write true or false',
        "r.yaml:4: `model.attention`: expected text, got 3: put quotes around it",
    ]


def test_files_in_a_circle_are_a_mistake(mistakes, here):
    (here / "models/a.yaml").write_text("base: b.yaml\n")
    (here / "models/b.yaml").write_text("path: x/y\nbase: a.yaml\n")
    assert mistakes(only=with_model("models/a.yaml")) == [
        "models/b.yaml:2: files that refer to each other in a circle: models/a.yaml -> models/b.yaml -> models/a.yaml"
    ]
    assert "in a circle: r.yaml -> r.yaml" in mistakes(only="name: r\nbase: r.yaml\n")[0]


def test_a_file_that_is_not_there_is_the_only_mistake(mistakes):
    (said,) = mistakes(only=with_model("models/gone.yaml"))
    assert said.startswith("r.yaml:2: no such file: models/gone.yaml (looked in ")


def test_a_file_that_cannot_be_read_is_the_only_mistake(mistakes, here):
    (here / "models/m.yaml").write_text("path: [\n")
    (said,) = mistakes(only=with_model("{base: models/m.yaml}"))
    assert said.startswith("models/m.yaml:1: not YAML")


@pytest.mark.parametrize("model", ["gpt2", "models/m", "3", "[a]", "true"])
def test_what_is_neither_a_section_nor_a_file_is_a_mistake(mistakes, model):
    (said,) = mistakes(only=with_model(model))
    assert said.startswith("r.yaml:2: ") and "expected keys and values" in said


def test_a_component_may_be_its_name_alone(load):
    recipe = load("", "data.filters=[length]", "optimizer=muon")
    assert recipe.data.filters[0].name == "length" and recipe.optimizer.name == "muon"


def test_base_must_be_a_file(mistakes):
    assert mistakes(only=with_model("{base: 3, path: a/b}")) == ["r.yaml:2: `base` must be the path of a .yaml file"]


@pytest.mark.parametrize("written", ["cpt", "{preset: cpt}"])
def test_adapters_may_be_chosen_by_the_name_of_a_preset(load, written):
    assert load(only=with_model(f"{{path: a/b, lora: {written}}}")).model.lora == {"preset": "cpt"}


def test_a_preset_can_be_varied_overridden_and_dumped(load, here):
    assert load("", "model.lora=cpt").model.lora == {"preset": "cpt"}
    recipe = load(only=with_model("{path: a/b, lora: {preset: cpt, r: 8}}"))
    (here / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(here / "again.yaml") == recipe and recipe.model.lora == {"preset": "cpt", "r": 8}


@pytest.mark.parametrize(
    ("written", "said"), [("cptt", "expected keys and values or the path"), ("{preset: full}", "expected one of cpt")]
)
def test_an_unknown_preset_is_a_mistake(mistakes, written, said):
    assert said in mistakes(only=with_model(f"{{path: a/b, lora: {written}}}"))[0]
