"""The first gate: unknown keys, missing keys and wrong types, in plain words and with their lines."""

import pytest

from cpt.recipe.schema import Recipe
from cpt.recipe.sections import all_keys, annotation_at, keys_of, section_in
from cpt.recipe.shape import unknown_key


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("modle: 1\n", "r.yaml:5: `modle` is not a recipe key. Did you mean `model`?"),
        ("Optimizer: 1\n", "r.yaml:5: `Optimizer` is not a recipe key. Did you mean `optimizer`?"),
        ("output-dir: x\n", "r.yaml:5: `output-dir` is not a recipe key. Did you mean `output_dir`?"),
        (
            "learning_rate: 1\n",
            "r.yaml:5: `learning_rate` is not a recipe key. Write it as `optimizer.learning_rate`.",
        ),
        ("lr: 1\n", "r.yaml:5: `lr` is not a recipe key. Write it as `optimizer.learning_rate`."),
        ("sequence_length: 1\n", "r.yaml:5: `sequence_length` is not a recipe key. There is `data.sequence_length`."),
        (
            "gradient_checkpointing: true\n",
            "r.yaml:5: `gradient_checkpointing` is not a recipe key. It is Hugging Face's: write it as",
        ),
        (
            "max_steps: 10\n",
            (
                "r.yaml:5: `max_steps` is not a recipe key. Write it as `budget.tokens` (in tokens: steps x tokens of"
                " a step)."
            ),
        ),
        (
            "revision: x\n",
            "r.yaml:5: `revision` is not a recipe key. There is `model.revision` and `tokenizer.revision` and",
        ),
        ("zzz: 1\n", "r.yaml:5: `zzz` is not a recipe key. There are: name, description"),
        (
            "monitoring: {weight: 1}\n",
            (
                "r.yaml:5: `monitoring.weight` is not a key of `monitoring`. There is `data.sources[0].weight` and"
                " `rewards[0].weight`."
            ),
        ),
        ("seed: true\n", "r.yaml:5: `seed`: expected a whole number, got true"),
        ("seed: 1.5\n", "r.yaml:5: `seed`: expected a whole number, got 1.5"),
        ('seed: "3"\n', 'r.yaml:5: `seed`: expected a whole number, got the text "3": write it without quotes'),
        ("seed: 1,000\n", 'r.yaml:5: `seed`: expected a whole number, got the text "1,000"'),
        ("seed: -1\n", "r.yaml:5: `seed`: must be at least 0, got -1"),
        ("seed: 4294967296\n", "r.yaml:5: `seed`: must be less than 4294967296, got 4294967296"),
        ("seed: [1]\n", "r.yaml:5: `seed`: expected a whole number, got a list of 1"),
        ("seed:\n", "r.yaml:5: `seed`: expected a whole number, got nothing"),
        (
            "optimizer: {learning_rate: .inf}\n",
            "r.yaml:5: `optimizer.learning_rate`: must be a finite number, got .inf",
        ),
        ("optimizer: {learning_rate: 0}\n", "r.yaml:5: `optimizer.learning_rate`: must be more than 0.0, got 0"),
        ("optimizer: {name: 3}\n", "r.yaml:5: `optimizer.name`: expected text, got 3: put quotes around it"),
        ("optimizer:\n", "r.yaml:5: `optimizer`: expected keys and values, got nothing"),
        ("tags: a\n", 'r.yaml:5: `tags`: expected a list, got the text "a"'),
        ("tags:\n  - a\n  - 3\n", "r.yaml:7: `tags[1]`: expected text, got 3: put quotes around it"),
        ("output_dir: 3\n", "r.yaml:5: `output_dir`: expected text, got 3"),
        ("evaluation: {held_out_share: 1}\n", "r.yaml:5: `evaluation.held_out_share`: must be at most 0.5, got 1"),
        ("training: [a]\n", "r.yaml:5: `training`: expected keys and values, got a list of 1"),
    ],
)
def test_a_wrong_key_or_value_is_told_in_plain_words(mistakes, added, said):
    (line,) = mistakes(added)
    assert line.startswith(said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            "model.from_scratch=yes",
            '`model.from_scratch`: expected true or false, got the text "yes": write true or false',
        ),
        ("model.from_scratch=1", "`model.from_scratch`: expected true or false, got 1"),
        (
            "model.dtype=flaot32",
            '`model.dtype`: expected one of auto, float32, bfloat16, float16; got the text "flaot32". Did you mean',
        ),
        (
            "data.packing=",
            "`data.packing`: expected one of best_fit, concatenate, sliding_window, none, token_budget; got nothing",
        ),
        ("data.sources=[]", "`data.sources`: must not be empty"),
        ("model.revision=12e45", "`model.revision`: expected text, got 1.2e46: put quotes around it"),
        ("name=a b", "`name`: may hold letters, digits"),
        ("name=-a", "`name`: may hold letters, digits"),
        ("model={}", "`model.path` is missing"),
        ("data={}", "`data.sources` is missing. The mixture: weights are shares of tokens."),
        (
            "data.filters=[{min_characters: 3}]",
            "`data.filters[0].name` is missing. A built-in's name, or your own `package.module:function`.",
        ),
    ],
)
def test_a_wrong_value_is_told_in_plain_words(mistakes, override, said):
    assert said in mistakes("", override)[0]


@pytest.mark.parametrize("number", ["1e3", "1_000", "1000.0", "0x3e8"])
def test_a_whole_number_may_be_written_in_many_ways(load, number):
    tokens = load("", f"budget.tokens={number}").budget.tokens
    assert tokens == 1000 and isinstance(tokens, int)


def test_what_is_missing_is_told_with_what_it_is_for(mistakes):
    assert mistakes(only="name: x\n") == [
        "r.yaml:1: `budget` is missing. How long to train, in tokens (positions of rows, padding included).",
        "r.yaml:1: `data` is missing. What the model reads.",
        "r.yaml:1: `model` is missing. Which model is trained, and from which weights.",
    ]


def test_95_percent_of_single_slips_are_guessed_right_for_every_key_of_the_schema(slips_of):
    right, all_slips = 0, 0
    for location in all_keys():
        *above, key = location
        beside = keys_of(section_in(annotation_at(tuple(above))))
        for wrong in slips_of(key, beside):
            all_slips += 1
            right += f"Did you mean `{key}`?" in unknown_key((*above, wrong))
    assert all_slips > 500 and right / all_slips >= 0.95


def test_every_key_of_the_schema_has_a_description():
    for location in all_keys():
        section = section_in(annotation_at(location[:-1])) or Recipe
        field = keys_of(section)[location[-1]]
        inner = section_in(field.annotation)
        assert field.description or (inner and inner.__doc__), location
