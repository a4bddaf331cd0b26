"""The JSON schema says what the loader says."""

import json

import pytest
from jsonschema import Draft202012Validator

from cpt.recipe.json_schema import command, json_schema
from cpt.recipe.load import REPOSITORY
from cpt.recipe.tree import Mistakes, plain, read_text, read_yaml

RECIPES = [
    path
    for path in sorted((REPOSITORY / "recipes").rglob("*.yaml"))
    if not {"models", "mixtures", "presets", "demo", "pipelines", "search"} & {*path.relative_to(REPOSITORY).parts}
]


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_shipped_recipes_are_valid(validator, path):
    assert not list(validator.iter_errors(plain(read_yaml(path, Mistakes()))))


SOUND = "name: r\nmodel: {path: a/b}\ndata: {sources: [{path: a/b}]}\nbudget: {tokens: 5}\n"


@pytest.mark.parametrize(
    "added",
    [
        "",
        "training: {bf16: true, logging_strategy: steps}\n",
        "training: more.yaml\n",
        "optimizer: {name: my:own, anything: 1}\n",
        "optimizer: o.yml\n",
        "seed: 1e3\n",
        "stage: my_lab.stage\ntraining: {anything: 1}\n",
        "evaluation: {perplexity: [{base: h.yaml}, h.yaml]}\n",
        "tokenizer: {base: t.yaml, revision: null}\n",
    ],
)
def test_what_the_loader_takes_is_valid(validator, added):
    assert validator.is_valid(plain(read_text((SOUND + added).encode(), "r", Mistakes())))


@pytest.mark.parametrize(
    "added",
    [
        "modle: 1\n",
        "seed: 1.5\n",
        "seed: -1\n",
        "tokenizer: a/b\n",
        "tokenizer: {pth: a/b}\n",
        "training: {bf61: true}\n",
        "training: {learning_rate: 1}\n",
        "training: {bf16: 3}\n",
        "training: {logging_strategy: step}\n",
        "evaluation: {held_out_share: 1}\n",
        "evaluation: {perplexity: [{name: a}]}\n",
        "checkpoints: {keep: 0}\n",
    ],
)
def test_what_the_loader_refuses_is_not_valid(validator, added):
    assert not validator.is_valid(plain(read_text((SOUND + added).encode(), "r", Mistakes())))


@pytest.mark.parametrize(
    ("lora", "is_valid"),
    [
        ({"r": 8}, True),
        ({"rank": 8}, False),
        ({"quantize": "nf4", "double_quantize": True}, True),
        ({"quantize": "nf5"}, False),
        ({"method": "loha", "module_dropout": 0.1}, True),
        ({"method": "prefix_tuning"}, False),
    ],
)
def test_lora_has_the_keys_of_peft(validator, lora, is_valid):
    recipe = plain(read_text(SOUND.encode(), "r", Mistakes()))
    assert validator.is_valid({**recipe, "model": {"path": "a/b", "lora": lora}}) == is_valid


@pytest.mark.parametrize(
    ("tokens", "is_valid"),
    [("1_000_000", True), ("1.5B", True), ("20GB", False), ("1 k", True), ("many", False), ("1X", False)],
)
def test_numbers_that_editors_take_for_text(validator, tokens, is_valid):
    recipe = plain(read_text(SOUND.encode(), "r", Mistakes()))
    assert validator.is_valid({**recipe, "budget": {"tokens": tokens}}) == is_valid


def test_a_recipe_on_a_base_needs_nothing_else(validator):
    assert validator.is_valid({"base": "other.yaml"}) and not validator.is_valid({"name": "r"})


def test_the_command_prints_it_with_descriptions(capsys):
    command()
    printed = json.loads(capsys.readouterr().out)
    assert printed["$defs"]["Data"]["properties"]["sequence_length"]["description"]
    assert printed["properties"]["training"]["anyOf"][0]["properties"]["bf16"]["description"]
