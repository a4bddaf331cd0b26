"""The JSON schema says what the loader says."""

import json

import pytest
from jsonschema import Draft202012Validator

from cpt.recipe.json_schema import json_schema
from cpt.recipe.load import REPOSITORY
from cpt.recipe.tree import Mistakes, plain, read_text, read_yaml

OTHERS = {"models", "mixtures", "presets", "demo", "pipelines", "search"}  # no whole recipes
RECIPES = [
    path
    for path in sorted((REPOSITORY / "recipes").rglob("*.yaml"))
    if not OTHERS & {*path.relative_to(REPOSITORY).parts}
]
SOUND = "name: r\nmodel: {path: a/b}\ndata: {sources: [{path: a/b}]}\nbudget: {tokens: 5}\n"


@pytest.fixture(scope="module")
def validator():
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.fixture
def is_valid(validator):
    return lambda text: validator.is_valid(plain(read_text(text.encode(), "r", Mistakes())))


def test_the_command_prints_it(cpt):
    assert json.loads(cpt("schema")[1]) == json_schema()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_shipped_recipes_are_valid(validator, path):
    assert not list(validator.iter_errors(plain(read_yaml(path, Mistakes()))))


@pytest.mark.parametrize(
    "added",
    [
        "",
        "training: {bf16: true, logging_strategy: steps}",
        "training: more.yaml",
        "optimizer: o.yml",
        "seed: 1e3",
    ]
    + ["optimizer: {name: my:own, anything: 1}", "stage: my_lab.stage\ntraining: {anything: 1}"]
    + [
        "evaluation: {retain: general}",
        "evaluation: {retain: [code, {tasks: null}]}",
        "evaluation: {retain: {a: 0.1}}",
    ]
    + [
        "evaluation: {perplexity: [{base: h.yaml}, h.yaml]}",
        "tokenizer: {base: t.yaml, revision: null}",
    ],
)
def test_what_the_loader_takes_is_valid(is_valid, added):
    assert is_valid(f"{SOUND}{added}\n")


@pytest.mark.parametrize(
    "added",
    [
        "modle: 1",
        "seed: 1.5",
        "seed: -1",
        "tokenizer: a/b",
        "tokenizer: {pth: a/b}",
        "training: {bf61: true}",
    ]
    + ["training: {learning_rate: 1}", "training: {bf16: 3}", "training: {logging_strategy: step}"]
    + [
        "evaluation: {retain: genral}",
        "evaluation: {retain: {a: 2}}",
        "evaluation: {held_out_share: 1}",
        "evaluation: {perplexity: [{name: a}]}",
        "checkpoints: {keep: 0}",
    ],
)
def test_what_the_loader_refuses_is_not_valid(is_valid, added):
    assert not is_valid(f"{SOUND}{added}\n")


@pytest.mark.parametrize(
    ("valid", "values"),
    [
        (
            True,
            ["r: 8", "quantize: nf4, double_quantize: true", "method: loha, module_dropout: 0.1"],
        ),
        (False, ["rank: 8", "quantize: nf5", "method: prefix_tuning"]),
    ],
)
def test_lora_has_the_keys_of_peft(is_valid, valid, values):
    texts = [
        SOUND.replace("{path: a/b}", f"{{path: a/b, lora: {{{value}}}}}", 1) for value in values
    ]
    assert [is_valid(text) for text in texts] == [valid] * len(texts)


@pytest.mark.parametrize(
    ("valid", "values"), [(True, ['"1_000"', "1.5B", "1 k"]), (False, ["20GB", "many", "1X"])]
)
def test_numbers_may_have_units_that_editors_take_for_text(is_valid, valid, values):
    assert [is_valid(SOUND.replace("tokens: 5", f"tokens: {value}")) for value in values] == [
        valid
    ] * len(values)


def test_a_recipe_on_a_base_needs_nothing_else(is_valid):
    assert is_valid("base: other.yaml\n") and not is_valid("name: r\n")
    assert is_valid("base: other.yaml\ndata: {sequence_length: 5}\n")
    assert not is_valid(SOUND.replace("sources: [{path: a/b}]", "sequence_length: 5"))
