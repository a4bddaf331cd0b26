"""Sections in files of their own: found, merged, and mistakes shown in the file at fault."""

import re

import pytest

from cpt.data.readers.standard_library import documents, held_out, is_held_out
from cpt.recipe.load import dump_recipe, load_recipe
from cpt.recipe.schema import RETAIN_PRESETS

MODEL = "path: base/model\ndtype: bfloat16\nconfig:\n  model_type: llama\n  hidden_size: 64\n"


@pytest.fixture(autouse=True)
def model_file(here):
    (here / "models").mkdir()
    (here / "models/m.yaml").write_text(MODEL)


def with_model(text: str) -> str:
    return f"name: r\nmodel: {text}\ndata: {{sources: [{{path: some/texts}}]}}\nbudget: {{tokens: 10}}\n"


def test_a_whole_recipe_may_build_on_another(load, here):
    (here / "base.yaml").write_text(
        with_model("models/m.yaml") + "optimizer: {name: adamw, learning_rate: 1e-4}\n"
    )
    recipe = load(
        only="base: base.yaml\nname: mine\noptimizer: {learning_rate: 2e-4}\nmodel: {dtype: float32}\n"
    )
    assert (recipe.name, recipe.optimizer.learning_rate) == ("mine", 2e-4)
    assert (recipe.model.path, recipe.model.dtype) == ("base/model", "float32")


def test_lists_are_replaced_and_phases_take_the_place_of_a_bases_weights(load, here):
    (here / "mixture.yaml").write_text(
        "sources: [{name: a, path: x/a, weight: 3}, {name: b, path: x/b}]\n"
    )
    (here / "base.yaml").write_text(with_model("models/m.yaml") + "tags: [a, b]\n")
    data = "{base: mixture.yaml, phases: [{weights: {a: 1, b: 1}}]}"
    recipe = load(only=f"base: base.yaml\nname: r\ntags: [c]\ndata: {data}\n")
    assert recipe.data.phases[0].weights == {"a": 1, "b": 1} and recipe.tags == ["c"]


def test_a_section_that_names_a_file_takes_nothing_of_an_outer_base(load, here):
    (here / "base.yaml").write_text(
        with_model("{path: old/model, config: {model_type: qwen2, vocab_size: 3}}")
    )
    for model in ("models/m.yaml", "{base: models/m.yaml}"):
        config = load(only=f"base: base.yaml\nmodel: {model}\n").model.config
        assert config == {"model_type": "llama", "hidden_size": 64}


def test_every_kind_of_section_may_be_a_file(load, here):
    files = {
        "mixture": "sources: [{base: source.yaml, weight: 2}]\nfilters: [filter.yaml]\n",
        "source": "path: some/texts\ntext_column: body\n",
        "filter": "name: length\nmin_characters: 5\n",
        "budget": "tokens: 10\n",
        "training": "bf16: true\n",
        "lora": "r: 4\n",
    }
    for name, text in files.items():
        (here / f"{name}.yaml").write_text(text)
    recipe = load(
        only="name: r\nmodel: {path: a/b, lora: lora.yaml}\ndata: {base: mixture.yaml, sequence_length: 64}\n"
        "budget: budget.yaml\ntraining: {base: training.yaml, logging_steps: 3}\n"
    )
    assert recipe.data.sources[0].text_column == "body" and recipe.data.sources[0].weight == 2
    assert recipe.data.filters[0].options == {"min_characters": 5}
    assert recipe.training == {"bf16": True, "logging_steps": 3} and recipe.model.lora == {"r": 4}


def test_paths_start_from_the_file_that_names_them_then_from_here_then_from_the_shipped_recipes(
    load, here
):
    (here / "mine/models").mkdir(parents=True)
    (here / "mine/models/m.yaml").write_text("path: mine/model\n")
    (here / "mine/r.yaml").write_text(with_model("models/m.yaml"))
    assert load_recipe("mine/r.yaml").model.path == "mine/model"
    (here / "mine/models/m.yaml").unlink()
    assert load_recipe("mine/r.yaml").model.path == "base/model"
    assert load(only=with_model("models/gpt2/124m.yaml")).model.path == "openai-community/gpt2"


def test_a_mistake_is_shown_in_the_file_at_fault(mistakes, here):
    (here / "models/m.yaml").write_text("path: a/b\n\ndtyp: bfloat16\nfrom_scratch: no\n")
    lines = mistakes(only=with_model("\n  base: models/m.yaml\n  attention: 3"))
    assert [line.rpartition("`model.")[0] for line in lines] == [
        "models/m.yaml:3: ",
        "models/m.yaml:4: ",
        "r.yaml:4: ",
    ]


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("models/a.yaml", "models/b.yaml:2: .*models/a.yaml -> models/b.yaml -> models/a.yaml"),
        ("models/gone.yaml", "r.yaml:2: no such file: models/gone.yaml"),
        ("{base: models/broken.yaml}", "models/broken.yaml:1: not YAML"),
        ("gpt2", "r.yaml:2: expected keys and values"),
        ("models/m", "r.yaml:2: expected keys and values"),
        ("3", "r.yaml:2: .*expected keys and values"),
        ("[a]", "r.yaml:2: .*expected keys and values"),
        ("{base: 3, path: a/b}", "r.yaml:2: `base`"),
    ],
)
def test_what_is_neither_a_section_nor_a_file_is_the_only_mistake(mistakes, here, model, said):
    (here / "models/a.yaml").write_text("base: b.yaml\n")
    (here / "models/b.yaml").write_text("path: x/y\nbase: a.yaml\n")
    (here / "models/broken.yaml").write_text("path: [\n")
    (line,) = mistakes(only=with_model(model))
    assert re.match(said, line)


def test_a_component_may_be_its_name_alone(load):
    recipe = load("", "data.filters=[length]", "optimizer=muon")
    assert recipe.data.filters[0].name == "length" and recipe.optimizer.name == "muon"


# words of evaluation.retain

HELD = "held_out_share: 0.1"


def sets_of(recipe):
    evaluation = recipe.evaluation
    return (
        evaluation.retain,
        [one.name for one in evaluation.perplexity],
        [one.name for one in evaluation.tasks],
    )


@pytest.mark.parametrize("word", RETAIN_PRESETS)
def test_a_word_adds_its_set_or_its_tasks_and_the_saved_recipe_is_equal(load, here, word):
    recipe = load(f"evaluation: {{{HELD}, retain: {word}}}\n")
    tasks = ["hellaswag", "arc_easy", "piqa"]
    assert sets_of(recipe) == (({}, [], tasks) if word == "tasks" else ({word: None}, [word], []))
    (here / "saved.yaml").write_text(dump_recipe(recipe))
    assert load_recipe("saved.yaml") == recipe


@pytest.mark.parametrize(
    ("evaluation", "found"),
    [
        (
            "retain: [general, {code: 0.02}, tasks], every_steps: 5, tasks: [{name: piqa, limit: 3}]",
            "general code",
        ),
        (
            "retain: {code: 0.02, general: null, tasks: null}, every_steps: 5, tasks: [piqa]",
            "general code",
        ),
        ("retain: general, perplexity: [{path: a/b, name: general}]", "general"),
        ("retain: general, perplexity: [{path: texts/general.jsonl}]", "None"),
    ],
)
def test_words_stand_in_lists_and_limits_and_the_recipes_own_sets_win(load, evaluation, found):
    recipe = load(f"evaluation: {{{HELD}, {evaluation}}}\n")
    retain, sets, tasks = sets_of(recipe)
    assert sets == [None if name == "None" else name for name in found.split()]
    assert retain == {
        name: 0.02 if name == "code" else None for name in (found if sets[0] else "general").split()
    }
    assert tasks == (["piqa", "hellaswag", "arc_easy"] if len(sets) > 1 else [])


def test_a_source_of_this_name_is_meant_and_words_of_a_base_are_merged(load, here):
    (here / "base.yaml").write_text(
        with_model("{path: a/b}") + f"evaluation: {{{HELD}, retain: general}}\n"
    )
    recipe = load(
        "",
        "evaluation.retain.code=null",
        only="base: base.yaml\nevaluation: {retain: python-code}\n",
    )
    assert sets_of(recipe)[:2] == (
        dict.fromkeys(("general", "python-code", "code")),
        ["general", "code", "python-code"],
    )
    sources = "data.sources=[{path: a/b}, {path: a/c, name: general}]"
    assert sets_of(load("", sources, only="base: base.yaml\n")) == ({"general": None}, [], [])


@pytest.mark.slow
def test_prose_and_code_of_pythons_library_were_not_trained_on_by_the_demo(monkeypatch):
    whole = [*documents()]
    monkeypatch.setattr("cpt.data.readers.standard_library.documents", lambda: whole)
    kept = {kind: held_out(kind=kind) for kind in ("general", "domain")}
    trained = "".join(text for name, _, text in whole if not is_held_out(name))
    for texts in kept.values():
        assert len(texts) > 20 and max(map(len, texts)) < 5000
        assert not any(text in trained for text in texts)
