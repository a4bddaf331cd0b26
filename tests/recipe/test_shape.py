"""The first gate: unknown keys, missing keys and wrong types, in plain words and with their lines."""

import pytest

from cpt.recipe.keys import all_keys, annotation_at, keys_of, section_in
from cpt.recipe.schema import Recipe


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ("modle: 1\n", "`modle` `model`"),
        ("Optimizer: 1\n", "`Optimizer` `optimizer`"),
        ("output-dir: x\n", "`output-dir` `output_dir`"),
        ("learning_rate: 1\n", "`learning_rate` `optimizer.learning_rate`"),
        ("sequence_length: 1\n", "`data.sequence_length`"),
        ("gradient_checkpointing: true\n", "`training.gradient_checkpointing`"),
        ("max_steps: 10\n", "`budget.tokens` tokens"),
        ("revision: x\n", "`model.revision` `tokenizer.revision`"),
        ("zzz: 1\n", "`zzz` description"),
        ("monitoring: {weight: 1}\n", "`monitoring.weight` `data.sources[0].weight`"),
        ("seed: true\n", "`seed` whole true"),
        ('seed: "3"\n', "`seed` whole quotes"),
        ("seed: 1,000\n", "`seed` whole"),
        ("seed: -1\n", "`seed` 0"),
        ("seed: 4294967296\n", "`seed` 4294967296"),
        ("seed:\n", "`seed` nothing"),
        ("optimizer: {learning_rate: .inf}\n", "`optimizer.learning_rate` finite"),
        ("optimizer: {learning_rate: 0}\n", "`optimizer.learning_rate` 0,"),
        ("optimizer: {name: 3}\n", "`optimizer.name` quotes"),
        ("optimizer:\n", "`optimizer` nothing"),
        ("tags: a\n", "`tags` list"),
        ("training: [a]\n", "`training` list"),
        ("evaluation: {held_out_share: 1}\n", "`evaluation.held_out_share` 0.5"),
    ],
)
def test_a_wrong_key_or_value_is_reported_with_its_line_and_a_remedy(mistakes, added, named):
    (line,) = mistakes(added)
    assert line.startswith("r.yaml:5: ") and all(word in line for word in named.split(" "))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.from_scratch=yes", "`model.from_scratch`: true or false"),
        ("model.from_scratch=1", "`model.from_scratch`: true or false"),
        ("model.dtype=flaot32", "`model.dtype`: `float32`"),
        ("data.packing=", "`data.packing`: best_fit, nothing"),
        ("data.sources=[]", "`data.sources`: empty"),
        ("model.revision=12e45", "`model.revision`: quotes"),
        ("name=-a", "`name`: letters"),
        ("model={}", "`model.path` missing"),
        ("data={}", "`data.sources` missing"),
        ("data.filters=[{min_characters: 3}]", "`data.filters[0].name` missing"),
        ("tags=[a, 3]", "`tags[1]`: quotes"),
    ],
)
def test_a_wrong_value_is_reported_with_its_key(mistakes, override, named):
    assert all(word in mistakes("", override)[0] for word in named.split(" "))


@pytest.mark.parametrize("number", ["1e3", "1_000", "1000.0", "0x3e8"])
def test_a_whole_number_may_be_written_in_many_ways(load, number):
    tokens = load("", f"budget.tokens={number}").budget.tokens
    assert tokens == 1000 and isinstance(tokens, int)


def test_what_is_missing_is_told_with_what_it_is_for(mistakes):
    lines = mistakes(only="name: x\n")
    assert [line.split("`")[1] for line in lines] == ["budget", "data", "model"]


def test_every_key_of_the_schema_has_a_description():
    for location in all_keys():
        section = section_in(annotation_at(location[:-1])) or Recipe
        field = keys_of(section)[location[-1]]
        inner = section_in(field.annotation)
        assert field.description or (inner and inner.__doc__), location
