"""The first gate: unknown keys, missing keys, wrong types and numbers out of bounds, each with its line."""

from types import NoneType, UnionType
from typing import get_args

import pytest
from pydantic import BaseModel

from cpt.recipe.keys import all_keys, annotation_at, item_in, keys_of, section_in
from cpt.recipe.schema import Data, Recipe
from cpt.recipe.tree import dotted


@pytest.mark.parametrize(
    ("added", "named"),
    [
        ("modle: 1\n", "`modle` `model`"),
        ("output-dir: x\n", "`output-dir` `output_dir`"),
        ("learning_rate: 1\n", "`learning_rate` `optimizer.learning_rate`"),
        ("gradient_checkpointing: true\n", "`training.gradient_checkpointing`"),
        ("max_steps: 10\n", "`budget.tokens` tokens"),
        ("revision: x\n", "`model.revision` `tokenizer.revision`"),
        ("zzz: 1\n", "`zzz` description"),
        ("monitoring: {weight: 1}\n", "`monitoring.weight` `data.sources[0].weight`"),
        ("seed: true\n", "`seed` whole true"),
        ('seed: "3"\n', "`seed` whole quotes"),
        ("seed: 4294967296\n", "`seed` 4294967296"),
        ("seed:\n", "`seed` nothing"),
        ("optimizer: {learning_rate: .inf}\n", "`optimizer.learning_rate` finite"),
        ("optimizer: {name: 3}\n", "`optimizer.name` quotes"),
        ("optimizer:\n", "`optimizer` nothing"),
        ("tags: a\n", "`tags` list"),
        ("training: [a]\n", "`training` list"),
    ],
)
def test_a_wrong_key_or_value_is_reported_with_its_line_and_a_remedy(mistakes, added, named):
    (line,) = mistakes(added)
    assert line.startswith("r.yaml:5: ") and all(word in line for word in named.split(" "))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.from_scratch=1", "`model.from_scratch`: true or false"),
        ("model.dtype=flaot32", "`model.dtype`: `float32`"),
        ("data.packing=", "`data.packing`: best_fit, nothing"),
        ("model.revision=12e45", "`model.revision`: quotes"),
        ("name=-a", "`name`: letters"),
        ("model={}", "`model.path` missing"),
        ("data={}", "`data.sources` missing"),
        ("data.filters=[{min_characters: 3}]", "`data.filters[0].name` missing"),
        ("tags=[a, 3]", "`tags[1]`: quotes"),
        ("data.disk_bytes=1GB", "`data.disk_bytes` `max_tokens` `cpt store prune`"),
        ("data.sources[0].order_by=level", "`data.sources[0].order_by` `data.phases`"),
    ],
)
def test_a_wrong_value_is_reported_with_its_key(mistakes, override, named):
    assert all(word in mistakes("", override)[0] for word in named.split(" "))


def test_the_recipe_of_an_older_run_may_have_removed_keys_without_a_value(load):
    assert load("", "data.disk_bytes=null", "data.sources[0].order_by=null") == load()


def test_all_that_is_missing_is_reported(mistakes):
    assert [line.split("`")[1] for line in mistakes(only="name: x\n")] == [
        "budget",
        "data",
        "model",
    ]


def takes_several_types(annotation: object) -> bool:
    return isinstance(annotation, UnionType) and len({*get_args(annotation)} - {NoneType}) > 1


@pytest.mark.parametrize(
    "key", [key for key in all_keys() if takes_several_types(annotation_at(key))], ids=dotted
)
def test_no_key_of_several_types_shows_pydantics_names(mistakes, key):
    added = ["evaluation.perplexity=[{path: x}]"] if key[0] == "evaluation" else []
    lines = [
        line for value in ("3.5", "[]") for line in mistakes("", *added, f"{dotted(key)}={value}")
    ]
    assert all(f"`{dotted(key)}`: " in line for line in lines)


# Numbers


@pytest.mark.parametrize(
    ("written", "number"), [("20GB", 2 * 10**10), ("16GiB", 2**34), ("64 kB", 64_000), (1e6, 10**6)]
)
def test_a_number_of_bytes_may_have_a_unit(written, number):
    assert Data(sources=[{"path": "a"}], chunk_bytes=written).chunk_bytes == number


@pytest.mark.parametrize(
    ("override", "section", "option", "number"),
    [
        ("schedule={warmup_tokens: 20M}", "schedule", "warmup_tokens", 20_000_000),
        ("optimizer={name: 'my.module:own', state_bytes: 1GiB}", "optimizer", "state_bytes", 2**30),
    ],
)
def test_options_that_are_counts_may_have_units(load, override, section, option, number):
    assert getattr(load("", override), section).options[option] == number


WRONG = [
    *(("budget.tokens", text) for text in ("2GB", "1.5", "0.0001k", "'3'", "1X", "-1M", ".nan")),
    *(("data.chunk_bytes", text) for text in ("20M", "1k", "-5")),
    *(("data.sequence_length", text) for text in ("4KB", "1e12")),
    *(
        ("model.rope", text)
        for text in ("{theta: .nan}", "{theta: 1e6, length: 32K}", "{type: yarn, factor: 0.5}")
    ),
    *(("checkpoints.every_steps", text) for text in ("1k", "0")),
    *(("optimizer.learning_rate", text) for text in ("1e5", "0")),
    ("data.sources.0.max_documents", "20GB"),
    ("evaluation.retain", "{general: 2}"),
    ("data.max_bad_share", "1.5"),
    ("data.sources.0.weight", ".inf"),
    ("monitoring.profile", "0"),
    ("training.max_grad_norm", ".nan"),
    *(
        ("optimizer", text)
        for text in ("{weight_decay: .nan}", "{betas: [0.9, 95]}", "{embedding_learning_rate: 2}")
    ),
    *(
        ("optimizer", f"{{name: 'my.module:sophia', {key}}}")
        for key in ("rho: .nan", "embedding_learning_rate: 2")
    ),
    *(("schedule", text) for text in ("{warmup_tokens: 2GB}", "{warmup_tokens: -5}", "{floor: 5}")),
    *(("schedule", text) for text in ('{floor: "0.1"}', "{floor: true}")),
    ("schedule", "{name: continued, schedule: {name: wsd, decay_tokens: 1MB}, trained_tokens: 1M}"),
    ("safety.loss_guard", "{window: 2}"),
]


@pytest.mark.parametrize(("key", "text"), WRONG)
def test_a_wrong_unit_or_a_number_out_of_bounds_is_refused(mistakes, key, text):
    assert any(
        f"`: `{key.replace('.0.', '[0].')}" in line for line in mistakes("", f"{key}={text}")
    )


# The schema


def test_every_key_of_the_schema_has_a_description():
    for location in all_keys():
        section = section_in(annotation_at(location[:-1])) or Recipe
        field = keys_of(section)[location[-1]]
        inner = section_in(field.annotation)
        assert field.description or (inner and inner.__doc__), location


def test_there_are_at_most_115_keys_of_our_own():
    """Each counted where it is declared: held-out sets are written with the keys of sources."""
    sections = set()
    for *above, _ in all_keys():
        annotation = annotation_at(tuple(above))
        sections.add(section_in(annotation) or section_in(item_in(annotation)))
    bases = {
        base for section in sections for base in section.__mro__ if issubclass(base, BaseModel)
    }
    assert (
        sum(
            name in base.__dict__.get("__annotations__", {})
            for base in bases
            for name in base.model_fields
        )
        <= 115  # the last: checkpoints.max_failed_saves
    )
